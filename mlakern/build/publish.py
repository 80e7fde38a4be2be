"""Writing into a store: whole entries appear by a rename and disappear by one.

A folder that is being written or removed is called ``.tmp-…``, a name no reader looks at. A process
killed at any point leaves at most such a folder, and prune removes it.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlakern import store
from mlakern.manifest import Manifest, SchemaError
from mlakern.store import StoreError

_TEMPORARY = ".tmp-"
# Publication takes milliseconds; a temporary folder this old belongs to nobody.
_LEFTOVER_SECONDS = 3600.0


@dataclass(frozen=True)
class Garbage:
    """A folder that prune would remove, and why."""

    path: Path
    reason: str


class StoreWriter:
    """Publishes entries into the store folder `root` and removes dead ones."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def check_writable(self) -> None:
        """Make the folder if there is none; StoreError if entries cannot be written into it."""
        probe = self._temporary()
        try:
            probe.mkdir(parents=True)
            probe.rmdir()
        except OSError as error:
            raise _unwritable(self.root, error) from error

    def publish(self, manifest: Manifest, cubin: bytes, ptx: str) -> Path:
        """The folder of the entry, which is complete and on disk on return.

        Any number of processes may publish the same entry at once. An intact entry that is already
        there is left alone; a damaged one is replaced.

        Raises StoreError if the folder cannot be written.
        """
        final = self.root / store.entry_name(manifest)
        temporary = self._temporary()
        files = {
            manifest.cubin.name: cubin,
            manifest.ptx.name: ptx.encode(),
            store.MANIFEST_NAME: manifest.dumps().encode(),
        }
        try:
            temporary.mkdir(parents=True)
            for name, content in files.items():
                _write_synced(temporary / name, content)
            _sync_directory(temporary)
            self._move_in(temporary, final)
            _sync_directory(self.root)
        except OSError as error:
            raise _unwritable(final, error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def garbage(self) -> list[Garbage]:
        """What can serve no more: other kernel sources, damaged entries, leftovers of a kill."""
        dead = [g for path in store.entry_directories(self.root) if (g := _entry_garbage(path))]
        horizon = time.time() - _LEFTOVER_SECONDS
        for path in sorted(self.root.glob(_TEMPORARY + "*")):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < horizon:
                    dead.append(Garbage(path, "left by a build that was killed"))
        return dead

    def remove(self, garbage: Iterable[Garbage]) -> None:
        """Remove these folders; a reader sees each whole or not at all."""
        for item in garbage:
            grave = self._temporary()
            with suppress(FileNotFoundError):
                item.path.rename(grave)
            shutil.rmtree(grave, ignore_errors=True)

    def _move_in(self, temporary: Path, final: Path) -> None:
        # A rename onto a folder that is not empty fails, so the first writer wins. Two rounds
        # suffice: the second one only follows the removal of a damaged entry.
        for _ in range(2):
            try:
                temporary.rename(final)
                return
            except OSError:
                if not final.is_dir():
                    raise
            if is_intact(final):
                return
            self.remove([Garbage(final, "damaged")])
        if not is_intact(final):
            raise StoreError(f"{final}: damaged again while it was replaced")

    def _temporary(self) -> Path:
        return self.root / f"{_TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}"


def is_intact(path: Path) -> bool:
    """Whether the entry at `path` exists and every file of it is what its manifest says."""
    try:
        store.read_entry(path, "").verify()
    except (StoreError, SchemaError):
        return False
    return True


def _entry_garbage(path: Path) -> Garbage | None:
    try:
        entry = store.read_entry(path, "")
        if not entry.is_current:
            return Garbage(path, "built from other kernel sources")
        entry.verify()
    except (StoreError, SchemaError) as error:
        return Garbage(path, str(error))
    return None


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: cannot be written: {error.strerror}; "
        f"choose another folder with --out or ${store.CACHE_DIR_VARIABLE}"
    )


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The cubin store, as a reader sees it: where kernels lie, which one serves, and proof of it.

A root is a folder of entries; an entry is a folder ``<configuration>-<key>`` with the raw cubin,
its PTX and its manifest. Entries appear by a rename (mlakern.build.publish), so a reader sees a
whole entry or none. Reading never writes, locks or creates anything.

Several entries of one configuration may lie in a root. The one built from the kernel sources of
the installed package serves, whatever else is there: another one may take other parameters. If
several were (other compile options or tools), the first by name serves and a warning names all.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlakern import manifest as manifests
from mlakern.config import AXES, ConfigError, KernelConfig
from mlakern.cubin import CubinError, multiprocessor_version, version_of_arch
from mlakern.manifest import FileFacts, Manifest, ManifestError, SchemaError
from mlakern.sources import source_digest

CUBIN_NAME = "kernel.cubin"
PTX_NAME = "kernel.ptx"
MANIFEST_NAME = "manifest.json"

CUBIN_DIR_VARIABLE = "MLAKERN_CUBIN_DIR"
CACHE_DIR_VARIABLE = "MLAKERN_CACHE_DIR"
UNVERIFIED_VARIABLE = "MLAKERN_ALLOW_UNVERIFIED"

PACKAGED = Path(__file__).parent / "cubins"
_log = logging.getLogger(__name__)


class StoreError(Exception):
    """A kernel that cannot be served."""


class MissingKernelError(StoreError, LookupError):
    """No entry serves the configuration; the message says where it looked and what builds it."""


class CorruptEntryError(StoreError):
    """An entry that is not what its manifest says."""


class ArchitectureError(StoreError, ValueError):
    """A cubin for other hardware than its configuration names."""


class DriverVersionError(StoreError):
    """A driver older than the cubin's floor."""


@dataclass(frozen=True)
class Root:
    """A folder of entries and where its path comes from."""

    path: Path
    origin: str


@dataclass(frozen=True)
class Entry:
    """One stored kernel; nothing is read until it is asked for, and nothing is kept."""

    manifest: Manifest
    path: Path
    origin: str

    def load_cubin(self, driver_version: int | None = None) -> bytes:
        """The cubin, verified: size, SHA-256, architecture, and the driver's version if given.

        driver_version: as cuDriverGetVersion counts, 13000 for CUDA 13.0.

        Raises CorruptEntryError, ArchitectureError or DriverVersionError.
        """
        floor = self.manifest.min_driver
        if driver_version is not None and driver_version < floor:
            raise DriverVersionError(
                f"{self.path}: the driver supports CUDA {dotted(driver_version)}, "
                f"need at least {dotted(floor)}; update the driver"
            )
        trusted = _unverified_allowed()
        return self._check_architecture(self._read(self.manifest.cubin, trusted))

    def load_ptx(self) -> str:
        """The PTX, verified like the cubin; raises CorruptEntryError."""
        return self._read(self.manifest.ptx, _unverified_allowed()).decode()

    def verify(self) -> None:
        """Check all files, whatever the environment allows; raises as the loads do."""
        self._check_architecture(self._read(self.manifest.cubin, trusted=False))
        self._read(self.manifest.ptx, trusted=False)

    @property
    def is_current(self) -> bool:
        """Whether it was built from the kernel sources of the installed package."""
        return self.manifest.provenance.sources == source_digest()

    def _check_architecture(self, image: bytes) -> bytes:
        file = self.path / self.manifest.cubin.name
        arch = self.manifest.config.arch
        try:
            version = multiprocessor_version(image)
        except CubinError as error:
            raise _damaged(file, str(error)) from None
        if version != version_of_arch(arch):
            raise ArchitectureError(
                f"{file}: code for sm_{version}, need {arch}; {_remedy(self.path)}"
            )
        return image

    def _read(self, facts: FileFacts, trusted: bool) -> bytes:
        file = self.path / facts.name
        try:
            content = file.read_bytes()
        except OSError as error:
            raise _damaged(file, error.strerror or str(error)) from None
        if trusted:
            _log.warning("%s: not verified, %s is set", file, UNVERIFIED_VARIABLE)
            return content
        if len(content) != facts.size:
            raise _damaged(file, f"got {len(content)} bytes, need {facts.size}")
        digest = hashlib.sha256(content).hexdigest()
        if digest != facts.sha256:
            raise _damaged(file, f"SHA-256 is {digest}, need {facts.sha256}")
        return content


@dataclass(frozen=True)
class Store:
    """Roots in the order in which they are searched."""

    roots: tuple[Root, ...]

    def find(self, config: KernelConfig) -> Entry:
        """The entry that serves `config`.

        Raises MissingKernelError, or CorruptEntryError if a manifest cannot be believed.
        """
        for root in self.roots:
            found = [e for e in _entries_of(root, config) if e.is_current]
            if len(found) > 1:
                names = ", ".join(entry.path.name for entry in found)
                _log.warning("%s: several entries, the first serves: %s", root.path, names)
            if found:
                _log.debug("%s: served from %s (%s)", config.name, root.path, root.origin)
                return found[0]
        raise MissingKernelError(self._missing(config))

    def directories(self) -> Iterator[tuple[Root, Path]]:
        """Every entry folder, by root and name; read_entry reads one."""
        for root in self.roots:
            for path in entry_directories(root.path):
                yield root, path

    @property
    def places(self) -> str:
        """The folders in the order of the search, for messages."""
        return ", ".join(str(root.path) for root in self.roots)

    def _missing(self, config: KernelConfig) -> str:
        lines = [f"no kernel {config.name}; looked in"]
        present: set[KernelConfig] = set()
        for root in self.roots:
            configs = [c for c in map(_config_of, entry_directories(root.path)) if c]
            others = configs.count(config)
            built = f", {others} of this configuration from other kernel sources" if others else ""
            held = (
                f"{len(configs)} kernels{built}"
                if os.access(root.path, os.X_OK)
                else "no such folder, or not readable"
            )
            lines.append(f"  {root.path} ({root.origin}): {held}")
            present.update(configs)
        present.discard(config)
        if present:
            nearest = min(present, key=lambda c: (c.arch != config.arch, _differences(c, config)))
            lines.append(f"nearest: {nearest.name}; {', '.join(_differences(nearest, config)[1])}")
        lines.append(f"build it: mlakern build --config {config.name}")
        return "\n".join(lines)


def open_store(path: str | os.PathLike[str] | None = None) -> Store:
    """A store over the search order: `path`, $MLAKERN_CUBIN_DIR, the package, the user cache."""
    roots = []
    if path is not None:
        roots.append(Root(Path(path), "path given"))
    if directory := os.environ.get(CUBIN_DIR_VARIABLE):
        roots.append(Root(Path(directory), CUBIN_DIR_VARIABLE))
    roots.append(Root(PACKAGED, "package"))
    if (cache_root := user_cache()) is not None:
        roots.append(cache_root)
    return Store(tuple(roots))


def user_cache() -> Root | None:
    """$MLAKERN_CACHE_DIR or the user's cache folder; None where the user has no home."""
    if directory := os.environ.get(CACHE_DIR_VARIABLE):
        return Root(Path(directory), CACHE_DIR_VARIABLE)
    from platformdirs import user_cache_path

    try:
        path = user_cache_path("mlakern", appauthor=False)
    except RuntimeError:
        return None
    # Without HOME and a passwd entry older platformdirs answer "~/…": not a place.
    return Root(path / "cubins", "user cache") if path.is_absolute() else None


def entry_directories(root: Path) -> list[Path]:
    """The entry folders in `root` by name; none if it is no folder or cannot be listed."""
    try:
        with os.scandir(root) as found:
            names = sorted(entry.name for entry in found if entry.is_dir())
    except OSError:
        return []
    return [root / name for name in names if name.startswith("mla_")]


def read_entry(path: Path, origin: str, *, trusted: bool = False) -> Entry:
    """The entry in one folder; trusted: the manifest's digest is not compared.

    Raises SchemaError for one of another package version, CorruptEntryError for a damaged one.
    """
    file = path / MANIFEST_NAME
    try:
        text = file.read_bytes().decode()
        manifest = manifests.loads(text, verify=not trusted)
    except SchemaError:
        raise
    except OSError as error:
        raise _damaged(file, error.strerror or str(error)) from None
    except (ManifestError, UnicodeDecodeError) as error:
        raise _damaged(file, str(error)) from None
    if path.name != entry_name(manifest):
        raise _damaged(file, f"describes {entry_name(manifest)}, need {path.name}")
    return Entry(manifest, path, origin)


def entry_name(manifest: Manifest) -> str:
    """The folder that the entry of this manifest is in."""
    return directory_name(manifest.config, manifest.provenance.key)


def directory_name(config: KernelConfig, key: str) -> str:
    """The folder of the entry of `config` with this key, in hex."""
    return f"{config.name}-{key[:16]}"


def _entries_of(root: Root, config: KernelConfig) -> Iterator[Entry]:
    for path in entry_directories(root.path):
        if path.name.rpartition("-")[0] == config.name:
            try:
                yield read_entry(path, root.origin, trusted=_unverified_allowed())
            except SchemaError as error:
                _log.info("%s: passed over: %s", path, error)
            except CorruptEntryError:
                # Pruned by another process since it was listed: absent, not damaged.
                if path.exists():
                    raise


def _config_of(path: Path) -> KernelConfig | None:
    try:
        return KernelConfig.from_name(path.name.rpartition("-")[0])
    except ConfigError:
        return None


def _differences(have: KernelConfig, want: KernelConfig) -> tuple[int, list[str]]:
    pairs = [(axis, getattr(have, axis), getattr(want, axis)) for axis in AXES]
    texts = [f"{axis} {had!r} instead of {need!r}" for axis, had, need in pairs if had != need]
    return len(texts), texts


def _damaged(file: Path, what: str) -> CorruptEntryError:
    return CorruptEntryError(f"{file}: {what}; {_remedy(file.parent)}")


def _remedy(entry: Path) -> str:
    return f"try mlakern prune --store {entry.parent} and build again"


def _unverified_allowed() -> bool:
    return os.environ.get(UNVERIFIED_VARIABLE) == "1"


def dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from manifests import publish_sample, sample_cubin, sample_manifest

from mlakern import store
from mlakern.build.key import BuildKey
from mlakern.build.publish import StoreWriter, is_intact
from mlakern.config import KernelConfig
from mlakern.cubin import CubinError, multiprocessor_version, version_of_arch
from mlakern.sources import source_digest
from mlakern.store import (
    ArchitectureError,
    CorruptEntryError,
    DriverVersionError,
    MissingKernelError,
    StoreError,
    open_store,
)

CONFIG = KernelConfig()
OTHER = KernelConfig(page_size=32)


def load(root: Path) -> tuple[bytes, str]:
    entry = open_store(root).find(CONFIG)
    return entry.load_cubin(), entry.load_ptx()


def test_what_is_published_is_what_is_loaded(tmp_path: Path) -> None:
    path = publish_sample(tmp_path, key="ab" * 32)
    entry = open_store(tmp_path).find(CONFIG)
    assert path.name == "mla_sm100a_m128_p64_causal_folded_grid_f32_bf16-abababababababab"
    assert (entry.path, entry.origin) == (path, "path given")
    assert entry.manifest.config == CONFIG
    assert entry.load_cubin() == sample_cubin()
    assert entry.load_ptx() == f"// PTX of {'ab' * 32}\n"
    assert sorted(p.name for p in path.iterdir()) == ["kernel.cubin", "kernel.ptx", "manifest.json"]


class TestSearch:
    def test_order_is_path_environment_package_user_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given, environment, packaged = tmp_path / "a", tmp_path / "b", store.PACKAGED
        cache = Path(os.environ[store.CACHE_DIR_VARIABLE])
        monkeypatch.setenv(store.CUBIN_DIR_VARIABLE, str(environment))
        paths = [publish_sample(root) for root in (given, environment, packaged, cache)]
        origins = []
        for path in paths:
            entry = open_store(given).find(CONFIG)
            assert entry.path == path
            origins.append(entry.origin)
            path.rename(path.with_name("moved-away"))
        assert origins == ["path given", "MLAKERN_CUBIN_DIR", "package", "MLAKERN_CACHE_DIR"]
        with pytest.raises(MissingKernelError):
            open_store(given).find(CONFIG)

    def test_user_cache_without_home_and_passwd_entry_is_no_place(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(store.CACHE_DIR_VARIABLE)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", "/somewhere")
        found = store.user_cache()
        assert found is not None
        assert found.path == Path("/somewhere/.cache/mlakern/cubins")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
        assert store.user_cache() is None

    def test_an_entry_of_other_sources_does_not_serve(self, tmp_path: Path) -> None:
        publish_sample(tmp_path, sources="ee" * 32)
        with pytest.raises(MissingKernelError, match="1 of this configuration from other kernel"):
            open_store(tmp_path).find(CONFIG)
        current = publish_sample(tmp_path, key="f" * 64)
        assert open_store(tmp_path).find(CONFIG).path == current

    def test_of_several_the_first_serves_and_a_warning_names_all(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        second = publish_sample(tmp_path, key="2" * 64)
        first = publish_sample(tmp_path, key="1" * 64)
        assert open_store(tmp_path).find(CONFIG).path == first
        assert first.name in caplog.text
        assert second.name in caplog.text

    def test_an_entry_of_another_schema_is_passed_over(self, tmp_path: Path) -> None:
        old = publish_sample(tmp_path, key="1" * 64)
        manifest = json.loads((old / "manifest.json").read_text())
        (old / "manifest.json").write_text(json.dumps({**manifest, "schema": 0}))
        current = publish_sample(tmp_path, key="2" * 64)
        assert open_store(tmp_path).find(CONFIG).path == current

    def test_a_miss_names_places_nearest_and_command(self, tmp_path: Path) -> None:
        publish_sample(tmp_path, KernelConfig(page_size=16, mask="plain", pack_q=True))
        publish_sample(tmp_path, OTHER)
        with pytest.raises(LookupError) as caught:
            open_store(tmp_path).find(CONFIG)
        assert str(caught.value).splitlines() == [
            "no kernel mla_sm100a_m128_p64_causal_folded_grid_f32_bf16; looked in",
            f"  {tmp_path} (path given): 2 kernels",
            f"  {store.PACKAGED} (package): no such folder, or not readable",
            f"  {os.environ['MLAKERN_CACHE_DIR']} (MLAKERN_CACHE_DIR): "
            "no such folder, or not readable",
            "nearest: mla_sm100a_m128_p32_causal_folded_grid_f32_bf16; page_size 32 instead of 64",
            "build it: mlakern build --config mla_sm100a_m128_p64_causal_folded_grid_f32_bf16",
        ]

    def test_an_entry_in_a_folder_of_another_name_is_damaged(self, tmp_path: Path) -> None:
        path = publish_sample(tmp_path, OTHER)
        path.rename(tmp_path / store.directory_name(CONFIG, "0" * 64))
        with pytest.raises(CorruptEntryError, match=r"describes mla_sm100a_m128_p32_\S+, need mla"):
            open_store(tmp_path).find(CONFIG)


class TestDamage:
    @pytest.mark.parametrize("name", ["kernel.cubin", "kernel.ptx", "manifest.json"])
    def test_no_flipped_bit_is_served(self, tmp_path: Path, name: str) -> None:
        file = publish_sample(tmp_path) / name
        content = file.read_bytes()
        right = load(tmp_path)
        refused = 0
        for at in range(0, len(content), max(1, len(content) // 200)):
            damaged = bytearray(content)
            damaged[at] ^= 1 << at % 8
            file.write_bytes(damaged)
            try:
                # White space of the JSON may change without consequence.
                assert load(tmp_path) == right
            except StoreError:
                refused += 1
        assert refused > (100 if name == "manifest.json" else 20)
        if name != "manifest.json":
            assert refused == len(range(0, len(content), max(1, len(content) // 200)))

    @pytest.mark.parametrize("name", ["kernel.cubin", "kernel.ptx", "manifest.json"])
    @pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
    def test_a_short_file_is_refused_by_name(self, tmp_path: Path, name: str, keep: float) -> None:
        file = publish_sample(tmp_path) / name
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * keep)])
        with pytest.raises(CorruptEntryError, match=str(file)):
            load(tmp_path)

    @pytest.mark.parametrize("name", ["kernel.cubin", "kernel.ptx", "manifest.json"])
    def test_a_lost_file_is_refused_by_name(self, tmp_path: Path, name: str) -> None:
        file = publish_sample(tmp_path) / name
        file.unlink()
        with pytest.raises(CorruptEntryError, match=f"{file}: No such file"):
            load(tmp_path)

    def test_the_message_says_how_to_get_rid_of_it(self, tmp_path: Path) -> None:
        (publish_sample(tmp_path) / "kernel.cubin").write_bytes(b"")
        with pytest.raises(CorruptEntryError) as caught:
            load(tmp_path)
        assert str(caught.value).endswith(
            f"got 0 bytes, need 320; try mlakern prune --store {tmp_path} and build again"
        )

    def test_an_earlier_image_is_never_handed_out(self, tmp_path: Path) -> None:
        path = publish_sample(tmp_path)
        entry = open_store(tmp_path).find(CONFIG)
        assert entry.load_cubin() == sample_cubin()
        (path / "kernel.cubin").write_bytes(sample_cubin()[:-1] + b"x")
        with pytest.raises(CorruptEntryError, match=r"SHA-256 is \w+, need "):
            entry.load_cubin()

    def test_only_the_scary_variable_skips_the_hash_and_it_warns(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = publish_sample(tmp_path) / "kernel.cubin"
        damaged = sample_cubin()[:-1] + b"x"
        file.write_bytes(damaged)
        entry = open_store(tmp_path).find(CONFIG)
        for value in ("0", "", "true"):
            monkeypatch.setenv(store.UNVERIFIED_VARIABLE, value)
            with pytest.raises(CorruptEntryError):
                entry.load_cubin()
        monkeypatch.setenv(store.UNVERIFIED_VARIABLE, "1")
        with caplog.at_level(logging.WARNING):
            assert entry.load_cubin() == damaged
        assert f"{file}: not verified" in caplog.text
        with pytest.raises(CorruptEntryError):
            entry.verify()
        file.write_bytes(sample_cubin(103))
        with pytest.raises(ArchitectureError):
            entry.load_cubin()


class TestHardware:
    def test_a_cubin_of_another_architecture_is_refused(self, tmp_path: Path) -> None:
        file = publish_sample(tmp_path, cubin=sample_cubin(103)) / "kernel.cubin"
        entry = open_store(tmp_path).find(CONFIG)
        with pytest.raises(ArchitectureError, match=f"{file}: code for sm_103, need sm_100a"):
            entry.load_cubin()
        with pytest.raises(ValueError, match="sm_103"):
            entry.load_cubin()

    @pytest.mark.parametrize(
        ("image", "message"),
        [
            (b"MZ" + bytes(70), "need a little-endian 64-bit ELF file"),
            (sample_cubin()[:40], "need a little-endian 64-bit ELF file"),
            (sample_cubin(machine=62), r"ELF machine is 62, need 190 \(CUDA\)"),
            (sample_cubin(abi=7), r"CUDA ELF ABI is 7, need 8 \(toolkit 13\)"),
        ],
    )
    def test_what_is_no_cubin_is_refused(self, tmp_path: Path, image: bytes, message: str) -> None:
        publish_sample(tmp_path, cubin=image)
        with pytest.raises(CorruptEntryError, match=message):
            open_store(tmp_path).find(CONFIG).load_cubin()

    def test_driver_floor(self, tmp_path: Path) -> None:
        publish_sample(tmp_path)
        entry = open_store(tmp_path).find(CONFIG)
        assert entry.load_cubin(driver_version=13000) == sample_cubin()
        with pytest.raises(DriverVersionError, match=r"supports CUDA 12\.9, need at least 13\.0"):
            entry.load_cubin(driver_version=12090)

    @pytest.mark.parametrize("version", [90, 100, 103, 107, 120])
    def test_version_in_the_header(self, version: int) -> None:
        assert multiprocessor_version(sample_cubin(version)) == version

    def test_version_of_a_name(self) -> None:
        names = ("sm_90a", "sm_100a", "sm_103a", "sm_120")
        assert [version_of_arch(name) for name in names] == [90, 100, 103, 120]
        with pytest.raises(CubinError, match="got 'gfx942'"):
            version_of_arch("gfx942")


class TestPublication:
    def test_an_intact_entry_is_left_alone(self, tmp_path: Path) -> None:
        path = publish_sample(tmp_path)
        inode = path.stat().st_ino
        assert publish_sample(tmp_path) == path
        assert path.stat().st_ino == inode
        assert [p.name for p in tmp_path.iterdir()] == [path.name]

    def test_a_damaged_entry_is_replaced(self, tmp_path: Path) -> None:
        path = publish_sample(tmp_path)
        (path / "kernel.cubin").write_bytes(b"")
        publish_sample(tmp_path)
        assert load(tmp_path)[0] == sample_cubin()
        assert [p.name for p in tmp_path.iterdir()] == [path.name]

    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match=r"Not a directory; choose another folder with --out"):
            publish_sample(tmp_path / "file")

    def test_a_read_only_file_system_serves_but_takes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Permissions do not bind root, so the system's answer is made up."""
        publish_sample(tmp_path)

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        for call in ("mkdir", "rename", "unlink", "rmdir"):
            monkeypatch.setattr(os, call, refuse)
            # Python 3.10's Path holds its own references to the functions of os.
            monkeypatch.setattr(Path, call, refuse)
        assert load(tmp_path)[0] == sample_cubin()
        with pytest.raises(StoreError, match="Read-only file system; choose another folder"):
            publish_sample(tmp_path, OTHER)

    def test_garbage_is_what_cannot_serve(self, tmp_path: Path) -> None:
        good = publish_sample(tmp_path)
        stale = publish_sample(tmp_path, OTHER, sources="ee" * 32)
        damaged = publish_sample(tmp_path, OTHER, key="d" * 64)
        (damaged / "kernel.ptx").unlink()
        old, young = tmp_path / ".tmp-1-old", tmp_path / ".tmp-2-young"
        for path in (old, young):
            path.mkdir()
        os.utime(old, (1, 1))
        writer = StoreWriter(tmp_path)
        garbage = writer.garbage()
        assert {item.path for item in garbage} == {stale, damaged, old}
        writer.remove(garbage)
        assert set(tmp_path.iterdir()) == {good, young}
        assert load(tmp_path)[0] == sample_cubin()


_PUBLISH_AND_DIE = """
import os, signal, sys
from pathlib import Path
from manifests import publish_sample
step, real = int(sys.argv[2]), os.fsync
def fsync(descriptor):
    global step
    step -= 1
    if step == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(descriptor)
os.fsync = fsync
publish_sample(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("step", range(1, 7))
def test_a_killed_publication_leaves_all_or_nothing(tmp_path: Path, step: int) -> None:
    # Three files, their folder, the root: the sixth step is never reached.
    died = _python(_PUBLISH_AND_DIE, str(tmp_path), str(step)).returncode
    assert died == (0 if step == 6 else -9)
    entries = store.entry_directories(tmp_path)
    if step >= 5:
        assert [is_intact(path) for path in entries] == [True]
    else:
        assert entries == []
        assert len(list(tmp_path.glob(".tmp-*"))) == 1
        with pytest.raises(MissingKernelError):
            load(tmp_path)
    publish_sample(tmp_path)
    assert load(tmp_path)[0] == sample_cubin()


_PUBLISH_MANY = """
import sys
from pathlib import Path
from manifests import publish_sample
from mlakern.build.publish import StoreWriter
from mlakern.store import open_store
from mlakern.config import KernelConfig
root = Path(sys.argv[1])
configs = [KernelConfig(page_size=size) for size in (16, 32, 64, 128)]
for _ in range(25):
    for config in configs:
        publish_sample(root, config)
        entry = open_store(root).find(config)
        assert len(entry.load_cubin()) == 320 and entry.manifest.config == config
"""


def test_many_processes_publish_and_load_at_once(tmp_path: Path) -> None:
    processes = [_start(_PUBLISH_MANY, str(tmp_path)) for _ in range(4)]
    assert [(p.communicate()[1], p.returncode) for p in processes] == [("", 0)] * 4
    entries = list(tmp_path.iterdir())
    assert len(entries) == 4
    assert all(is_intact(path) for path in entries)


_LOAD_WATCHED = """
import os, pwd, sys
def absent(*_):
    raise KeyError("no passwd entry")
pwd.getpwuid = absent
from mlakern import open_store
from mlakern.config import KernelConfig
import mlakern.store, platformdirs, platformdirs.unix
WRITERS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.utime", "os.link",
           "os.symlink", "os.truncate", "os.chown", "fcntl.flock", "shutil.rmtree"}
def watch(event, arguments):
    if event == "open":
        _, mode, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        assert not writes, arguments
    assert event not in WRITERS, (event, arguments)
sys.addaudithook(watch)
entry = open_store(sys.argv[1]).find(KernelConfig())
print(len(entry.load_cubin()), len(entry.load_ptx()))
try:
    open("/dev/null", "w")
except AssertionError:
    print("watched")
"""


def test_loading_writes_nothing_and_needs_no_home(tmp_path: Path) -> None:
    publish_sample(tmp_path)
    done = _python(_LOAD_WATCHED, str(tmp_path), environment={})
    assert (done.stdout.split(), done.stderr) == (["320", "75", "watched"], "")


KEY = BuildKey(CONFIG, "ab", {"opt_level": "3"}, {"dsl": "1"})


class TestKey:
    @pytest.mark.parametrize(
        "other",
        [
            replace(KEY, sources="ac"),
            replace(KEY, options={"opt_level": "2"}),
            replace(KEY, options={"opt_level": "3", "debug": "1"}),
            replace(KEY, toolchain={"dsl": "2"}),
            *(
                replace(KEY, config=CONFIG.with_axes(**axis))
                for axis in (
                    {"page_size": 32},
                    {"mask": "plain"},
                    {"pack_q": True},
                    {"partial_dtype": "float16"},
                    {"out_dtype": "float8_e4m3fn"},
                )
            ),
        ],
    )
    def test_changing_any_field_changes_it(self, other: BuildKey) -> None:
        assert other.digest != KEY.digest

    def test_every_field_and_axis_is_in_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        texts = []
        monkeypatch.setattr(
            "mlakern.build.key.json.dumps", lambda document, **_: texts.append(document) or ""
        )
        assert KEY.digest
        (document,) = texts
        assert document.pop("key_schema") == 1
        assert document.pop("manifest_schema") == 2
        assert document == {
            "config": CONFIG.as_dict(),
            "sources": "ab",
            "options": {"opt_level": "3"},
            "toolchain": {"dsl": "1"},
        }

    def test_the_order_of_options_does_not_matter(self) -> None:
        one = replace(KEY, options={"a": "1", "b": "2"})
        assert one.digest == replace(KEY, options={"b": "2", "a": "1"}).digest

    def test_kernel_sources_change_the_digest_and_nothing_else_does(self, tmp_path: Path) -> None:
        files = ["kernels/a.py", "kernels/deep/b.py", "build/compiler.py", "signature.py"]
        others = ["store.py", "kernels/notes.txt", "build/runner.py"]
        trees = []
        for changed in [None, *files, *others]:
            tree = tmp_path / f"tree{len(trees)}"
            trees.append(tree)
            for name in [*files, *others]:
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / name).write_text("changed" if name == changed else name)
        digests = [source_digest(tree) for tree in trees]
        assert len({digests[0], *digests[1:5]}) == 5
        assert set(digests[5:]) == {digests[0]}

    def test_a_file_that_moves_changes_the_digest(self, tmp_path: Path) -> None:
        for name in ("one/kernels/a.py", "two/kernels/b.py"):
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).write_text("same")
        assert source_digest(tmp_path / "one") != source_digest(tmp_path / "two")


def test_samples_are_read_back_as_they_were_made(tmp_path: Path) -> None:
    entry = store.read_entry(publish_sample(tmp_path), "somewhere")
    sample = sample_manifest()
    assert entry.manifest.kernels == sample.kernels
    assert entry.manifest.limits == sample.limits


def _python(
    code: str, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    process = _start(code, *arguments, environment=environment)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _start(
    code: str, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    tests = Path(__file__).parent
    paths = {"PYTHONPATH": f"{tests}:{tests.parent}"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**(os.environ if environment is None else environment), **paths},
    )

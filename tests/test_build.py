from __future__ import annotations

import hashlib
import re
import subprocess
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path

import pytest
from fake_compiler import ended, wait_for
from manifests import sample_cubin

from mlakern.build import describe as describing
from mlakern.build import ptx_facts
from mlakern.build.compiler import Compiled, assemble
from mlakern.build.cubin_facts import read_cubin
from mlakern.build.describe import BuildError, describe
from mlakern.build.key import BuildKey
from mlakern.build.publish import is_intact
from mlakern.build.runner import Outcome, build
from mlakern.config import KernelConfig
from mlakern.cubin import CubinError
from mlakern.matrix import BuildItem
from mlakern.signature import Kind, Parameter, offsets, signatures
from mlakern.store import StoreError, entry_directories, open_store

CONFIG = KernelConfig()
SIGNATURES = signatures(CONFIG)
COMBINE = SIGNATURES["combine"]
KEY = BuildKey(CONFIG, "ab" * 32, {"arch": "sm_100a"}, {"dsl": "1"})


def spilling_ptx(values: int, registers: int, shared: int = 0) -> str:
    """A kernel that keeps `values` words alive across a barrier in `registers` registers.

    shared: bytes of static shared memory beside dynamic shared memory.
    """
    lines = [
        ".version 8.8",
        ".target sm_100a",
        ".address_size 64",
        ".extern .shared .align 16 .b8 dynamic[];",
        f".visible .entry spill(.param .u64 at)\n.maxnreg {registers}\n{{",
        f".reg .u64 %a; .reg .f32 %f<{values}>;",
        "ld.param.u64 %a, [at];",
    ]
    if shared:
        lines += [
            f".shared .align 16 .b8 held[{shared}];",
            "st.volatile.shared.f32 [held], 0f00000000;",
        ]
    lines += ["st.volatile.shared.f32 [dynamic], 0f00000000;"]
    lines += [f"ld.volatile.global.f32 %f{i}, [%a+{4 * i}];" for i in range(values)]
    lines += ["bar.sync 0;"]
    lines += [f"st.volatile.global.f32 [%a+{4 * i}], %f{i};" for i in range(values)]
    return "\n".join([*lines, "ret;\n}\n"])


def ptxas_says(ptx: str, workdir: Path) -> dict[str, int]:
    """What ptxas -v prints of the only entry, by the names of EntryFacts."""
    file = workdir / "verbose.ptx"
    file.write_text(ptx)
    ptxas = distribution("nvidia-cuda-nvcc").locate_file("nvidia/cu13/bin/ptxas")
    said = subprocess.run(
        [str(ptxas), "-v", "-arch", "sm_100a", str(file), "-o", str(workdir / "verbose.cubin")],
        check=True,
        capture_output=True,
        text=True,
    ).stderr
    patterns = {
        "registers": r"Used (\d+) registers",
        "barriers": r"used (\d+) barriers",
        "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
    }
    facts = {name: int(re.findall(pattern, said)[0]) for name, pattern in patterns.items()}
    # Not printed if there is none.
    return {**facts, "static_shared": sum(map(int, re.findall(r"(\d+) bytes smem", said)))}


class TestCubinFacts:
    @pytest.mark.parametrize(
        ("values", "registers", "shared"), [(60, 24, 0), (60, 32, 64), (100, 40, 4096), (8, 32, 0)]
    )
    def test_equal_what_ptxas_reports(
        self, tmp_path: Path, values: int, registers: int, shared: int
    ) -> None:
        ptx = spilling_ptx(values, registers, shared)
        entry = read_cubin(assemble(ptx, "sm_100a", tmp_path)).entries["spill"]
        want = ptxas_says(ptx, tmp_path)
        assert {name: getattr(entry, name) for name in want} == want
        assert (entry.spill_stores > 0) == (values > registers)

    def test_of_the_kernels(self, compiled: Compiled) -> None:
        facts = read_cubin(compiled.cubin)
        assert (facts.multiprocessor_version, facts.arch) == (100, "sm_100a")
        assert facts.assembler == f"V{distribution('nvidia-cuda-nvcc').version}"
        assert set(facts.entries) == {kernel.entry for kernel in compiled.kernels}
        for kernel in compiled.kernels:
            entry = facts.entries[kernel.entry]
            signature = SIGNATURES[kernel.role]
            sizes = [parameter.kind.size for parameter in signature]
            assert entry.parameters == tuple(zip(offsets(signature), sizes, strict=True))
            assert entry.block == kernel.block
            assert entry.spill_stores == entry.spill_loads == entry.stack == 0
            # Three warpgroups share 65,536 registers; setmaxnreg moves them between roles.
            assert entry.registers * kernel.block[0] <= 65536

    @pytest.mark.parametrize("image", [b"", sample_cubin(), b"\x7fELF" + bytes(100)])
    def test_what_is_no_cubin_is_refused(self, image: bytes) -> None:
        with pytest.raises(CubinError):
            read_cubin(image)


class TestPtxFacts:
    ptx = """.version 9.4
.target sm_100a
.address_size 64
.visible .entry one(
    .param .align 64 .b8 one_param_0[128],
    .param .u32 one_param_1,
    .param .u64 .ptr .global .align 16 one_param_2,
    .param .f32 one_param_3
)
{ ret; }
.visible .entry two() { ret; }
"""

    def test_parameters_have_natural_alignment(self) -> None:
        slots = ptx_facts.parameters(self.ptx, "one")
        assert slots == ((0, 128), (128, 4), (136, 8), (144, 4))
        assert ptx_facts.parameters(self.ptx, "two") == ()
        assert ptx_facts.target(self.ptx) == "sm_100a"

    def test_what_is_absent_or_unreadable_is_named(self) -> None:
        with pytest.raises(ptx_facts.PtxError, match="no entry three"):
            ptx_facts.parameters(self.ptx, "three")
        with pytest.raises(ptx_facts.PtxError, match=r"cannot read parameter '\.param \.pred p'"):
            ptx_facts.parameters(".entry e(.param .pred p) {}", "e")
        with pytest.raises(ptx_facts.PtxError, match=r"no \.target"):
            ptx_facts.target("")


class TestDescribe:
    def test_manifest_of_the_kernels(self, compiled: Compiled) -> None:
        manifest = describe(CONFIG, compiled, KEY)
        assert manifest.cubin.sha256 == hashlib.sha256(compiled.cubin).hexdigest()
        assert manifest.cubin.size == len(compiled.cubin)
        assert manifest.ptx.sha256 == hashlib.sha256(compiled.ptx.encode()).hexdigest()
        assert manifest.provenance.key == KEY.digest
        assert manifest.provenance.toolchain == {
            "dsl": "1",
            "ptxas": f"V{distribution('nvidia-cuda-nvcc').version}",
        }
        assert [(kernel.role, kernel.when) for kernel in manifest.kernels] == [
            ("attention", "True"),
            ("combine", "splits > 1 and batch * seq_len_q * num_heads >= multiprocessors"),
            ("combine_bands2", "splits > 1 and batch * seq_len_q * num_heads < multiprocessors"),
        ]
        assert list(manifest.derived) == ["query_tiles", "tile_rows"]
        attention = manifest.kernel("attention")
        assert [p.name for p in attention.parameters] == [p.name for p in SIGNATURES["attention"]]
        assert (attention.block, attention.cluster) == ((384, 1, 1), (2, 1, 1))
        # sm_100 gives a block 227 KiB of shared memory.
        assert attention.dynamic_shared + attention.static_shared <= 227 * 1024
        assert [rule.parameter for rule in manifest.tensor_maps] == [
            p.name for p in SIGNATURES["attention"] if p.kind is Kind.TENSOR_MAP
        ]
        assert [region.name for region in manifest.workspace.regions] == [
            "partial_out",
            "partial_lse",
        ]

    def test_no_path_host_or_time_is_in_it(self, compiled: Compiled) -> None:
        text = describe(CONFIG, compiled, KEY).dumps()
        assert "/tmp" not in text
        assert str(Path.home()) not in text
        assert str(Path(__file__).parents[1]) not in text + compiled.ptx
        assert not re.search(r"20\d\d-\d\d-\d\d", text)

    @pytest.mark.parametrize(
        ("signature", "message"),
        [
            (
                (Parameter("seq_lens", Kind.INT32, ""), *COMBINE[1:]),
                r"cubin: mla_decode_combine_\d: parameter seq_lens: got offset 0, size 8, "
                r"need offset 0, size 4",
            ),
            (
                (*COMBINE[:6], Parameter("num_heads", Kind.INT64, ""), *COMBINE[7:]),
                r"parameter num_heads: got offset 44, size 4, need offset 48, size 8",
            ),
            (COMBINE[:-1], r"got 17 parameters, need 16"),
            (
                (*COMBINE, Parameter("more", Kind.INT32, "")),
                r"got 17 parameters, need 18",
            ),
        ],
    )
    def test_a_kernel_that_takes_other_parameters_is_refused(
        self,
        compiled: Compiled,
        monkeypatch: pytest.MonkeyPatch,
        signature: tuple[Parameter, ...],
        message: str,
    ) -> None:
        changed = {**SIGNATURES, "combine": signature}
        monkeypatch.setattr(describing, "signatures", lambda _: changed)
        with pytest.raises(BuildError, match=message):
            describe(CONFIG, compiled, KEY)

    def test_ptx_that_takes_other_parameters_than_the_cubin_is_refused(
        self,
        compiled: Compiled,
    ) -> None:
        ptx = compiled.ptx.replace(".param .f32 ", ".param .f64 ", 1)
        with pytest.raises(BuildError, match=r"PTX: mla_decode_\w+: parameter \w+: got offset"):
            describe(CONFIG, replace(compiled, ptx=ptx), KEY)

    def test_code_for_another_architecture_is_refused(
        self,
        compiled: Compiled,
    ) -> None:
        ptx = compiled.ptx.replace(".target sm_100a", ".target sm_103a")
        with pytest.raises(BuildError, match="PTX is for sm_103a, need sm_100a"):
            describe(CONFIG, replace(compiled, ptx=ptx), KEY)

    def test_a_block_that_the_cubin_does_not_require_is_refused(
        self,
        compiled: Compiled,
    ) -> None:
        attention, *others = compiled.kernels
        wrong = replace(compiled, kernels=(replace(attention, block=(256, 1, 1)), *others))
        with pytest.raises(BuildError, match=r"requires blocks of \(384, 1, 1\), need \(256, 1"):
            describe(CONFIG, wrong, KEY)

    def test_spills_fail_unless_allowed(
        self,
        compiled: Compiled,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        ptx = spilling_ptx(60, 24)
        kernel = replace(compiled.kernels[1], entry="spill")
        spilling = Compiled(ptx, assemble(ptx, "sm_100a", tmp_path), (kernel,), {})
        signature = (Parameter("at", Kind.POINTER, ""),)
        monkeypatch.setattr(describing, "signatures", lambda _: {"combine": signature})
        said = ptxas_says(ptx, tmp_path)
        message = rf"spill: registers spill \({said['spill_stores']} bytes stored"
        with pytest.raises(BuildError, match=message):
            describe(CONFIG, spilling, KEY)
        allowed = describe(CONFIG, spilling, KEY, allow_spills=True)
        assert allowed.kernels[0].spill_loads == said["spill_loads"]


ITEMS = [BuildItem(KernelConfig(page_size=size)) for size in (16, 32, 64, 128)]


class TestRunner:
    @pytest.mark.parametrize(
        ("behaviour", "error"),
        [
            ("exit", "compiler process died: exit status 7"),
            ("segfault", "compiler process died: signal 11"),
            ("raise", "RuntimeError: refused by the fake"),
        ],
    )
    @pytest.mark.parametrize("jobs", [1, 3])
    def test_one_failure_costs_one_configuration(
        self,
        fake: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        behaviour: str,
        error: str,
        jobs: int,
    ) -> None:
        monkeypatch.setenv("FAKE_BEHAVIOUR", behaviour)
        seen: list[Outcome] = []
        outcomes = build(ITEMS, tmp_path, jobs=jobs, progress=seen.append, compiler=fake)
        assert [outcome.config for outcome in outcomes] == [item.config for item in ITEMS]
        assert [o.status for o in outcomes] == ["built", "failed", "built", "built"]
        failed = outcomes[1]
        assert (failed.error, failed.path) == (error, None)
        printed = failed.log.splitlines()
        assert printed[:2] == [f"compiling {ITEMS[1].config.name}", "last words"]
        assert sorted(seen, key=lambda o: o.config) == outcomes
        assert len(entry_directories(tmp_path)) == 3

    def test_a_compiler_that_hangs_is_ended_with_what_it_started(
        self,
        fake: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        processes = tmp_path / "processes"
        monkeypatch.setenv("FAKE_CHILD", str(processes))
        monkeypatch.setenv("FAKE_BEHAVIOUR", "hang")
        outcomes = build(ITEMS, tmp_path / "store", jobs=1, timeout=3, compiler=fake)
        assert [o.status for o in outcomes] == ["built", "failed", "built", "built"]
        assert outcomes[1].error == "no result after 3 s; try a longer --timeout"
        assert 3 <= outcomes[1].seconds < 30
        assert outcomes[1].log.startswith(f"compiling {ITEMS[1].config.name}\n")
        compiler, child = map(int, processes.read_text().split())
        assert wait_for(lambda: ended(compiler))
        assert wait_for(lambda: ended(child))

    def test_a_store_that_cannot_be_written_stops_the_build_before_it_compiles(
        self, fake: str, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        seen: list[Outcome] = []
        with pytest.raises(StoreError, match="file/store: cannot be written: Not a directory"):
            build(ITEMS, tmp_path / "file" / "store", progress=seen.append, compiler=fake)
        assert seen == []

    def test_what_is_present_is_not_compiled_again(
        self,
        fake: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        first = build(ITEMS, tmp_path, jobs=2, compiler=fake)
        assert {outcome.status for outcome in first} == {"built"}
        monkeypatch.setenv("FAKE_BEHAVIOUR", "raise")
        second = build(ITEMS, tmp_path, jobs=2, compiler=fake)
        assert {outcome.status for outcome in second} == {"present"}
        assert [o.path for o in second] == [o.path for o in first]

    def test_a_damaged_entry_is_built_again(self, fake: str, tmp_path: Path) -> None:
        path = build(ITEMS[:2], tmp_path, jobs=1, compiler=fake)[0].path
        assert path is not None
        (path / "kernel.ptx").write_text("")
        outcomes = build(ITEMS[:2], tmp_path, jobs=1, compiler=fake)
        assert [outcome.status for outcome in outcomes] == ["built", "present"]
        assert is_intact(path)

    def test_what_is_built_is_found(
        self,
        fake: str,
        compiled: Compiled,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("FAKE_BEHAVIOUR", "print")
        build(ITEMS, tmp_path, jobs=2, compiler=fake)
        for item in ITEMS:
            entry = open_store(tmp_path).find(item.config)
            assert entry.manifest.config == item.config
            assert entry.load_cubin() == compiled.cubin
            assert entry.load_ptx() == compiled.ptx

    def test_sources_that_change_during_the_build_are_noticed(
        self,
        fake: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("mlakern.build.runner.source_digest", lambda: "00" * 32)
        (outcome,) = build(ITEMS[:1], tmp_path, compiler=fake)
        assert outcome.error == "kernel sources changed during the build; build again"
        assert entry_directories(tmp_path) == []

    def test_nothing_to_build(self, fake: str, tmp_path: Path) -> None:
        assert build([], tmp_path, compiler=fake) == []


def test_two_builds_write_the_same_bytes(tmp_path: Path) -> None:
    """In another process, folder and order, after another kernel or as the first one."""
    one, other = BuildItem(CONFIG), BuildItem(KernelConfig(page_size=16, mask="plain"))
    built = [
        build([one], tmp_path / "a", jobs=1)[0],
        build([other, one], tmp_path / "b", jobs=1)[1],
    ]
    assert [outcome.error for outcome in built] == ["", ""]
    contents = [
        {file.name: file.read_bytes() for file in outcome.path.iterdir()}
        for outcome in built
        if outcome.path is not None
    ]
    assert len(contents) == 2
    assert sorted(contents[0]) == ["kernel.cubin", "kernel.ptx", "manifest.json"]
    assert contents[0] == contents[1]

"""`mlakern run` and `mlakern plan`: exit status, JSON and the table, by a backend made for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result
from manifests import publish_sample

from mlakern.cli.app import app
from mlakern.config import KernelConfig
from mlakern.planning import plan
from mlakern.reference import Numerics, modelled
from mlakern.validation import backends
from mlakern.validation.backends import EmulatorBackend
from mlakern.validation.compare import Output
from mlakern.validation.gpu import GpuBackend
from mlakern.validation.problem import Problem
from mlakern.validation.spec import MODEL_SCALE

GOOD = KernelConfig(page_size=64)
WRONG = KernelConfig(page_size=32)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two kernels in a store of their own; page_size 32 computes wrong results."""
    monkeypatch.setenv("MLAKERN_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.delenv("MLAKERN_CUBIN_DIR", raising=False)
    for config in (GOOD, WRONG):
        publish_sample(tmp_path / "store", config)
    monkeypatch.setattr(EmulatorBackend, "execute", execute)
    return tmp_path / "store"


SEEN: list[tuple[EmulatorBackend, Problem]] = []


def execute(self: EmulatorBackend, entry: backends.Entry, problem: Problem) -> Output:
    SEEN.append((self, problem))
    result = modelled(problem.attention, Numerics(), problem.division)
    wrong = 0.5 if entry.manifest.config == WRONG else 0.0
    out = (result.out + wrong).astype(ml_dtypes.bfloat16)
    return Output(out, "bfloat16", result.lse.astype(np.float32))


def mlakern(*arguments: str | Path) -> Result:
    SEEN.clear()
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_right_kernel_ends_in_pass(store: Path) -> None:
    done = mlakern("run", GOOD.name, "--store", store)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "PASS"
    assert "4e-03" in done.stdout  # the bound beside the error


def test_a_wrong_kernel_ends_in_fail_with_the_bound_it_broke(store: Path) -> None:
    done = mlakern("run", "--page-size", "32", "--store", store)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "FAIL"
    assert "kernel_vs_modelled_out_bf16" in done.stdout


def test_a_missing_kernel_cannot_run(store: Path) -> None:
    done = mlakern("run", "--page-size", "16", "--store", store)
    assert done.exit_code == 3
    assert "build it: mlakern build --config mla_sm100a_m128_p16_causal" in done.stdout
    assert done.stdout.splitlines()[-1] == "UNAVAILABLE"


def test_gpu_backend_without_a_gpu_cannot_run(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlakern.validation.gpu.cannot_run_reason", lambda *_: "no CUDA device")
    done = mlakern("run", GOOD.name, "--backend", "gpu", "--store", store, "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 3
    assert (document["status"], document["backend"]) == ("unavailable", "gpu")
    assert document["reason"] == "no CUDA device"


def test_json_of_one_kernel(store: Path) -> None:
    done = mlakern(
        "run", GOOD.name, "--store", store, "--json", "--heads", 6, "--seq-len-q", 2,
        "--seq-lens", "0,257", "--splits", 3, "--seed", 9, "--lse-base", "e",
        "--rescale-threshold", 2.5, "--values", "ramp", "--layout", "padded",
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert done.exit_code == 0
    assert document["status"] == "pass"
    assert document["config"] == GOOD.as_dict()
    assert document["problem"] == {
        "num_heads": 6,
        "seq_len_q": 2,
        "seq_lens": [0, 257],
        "splits": 3,
        "seed": 9,
        "values": "ramp",
        "softmax_scale": MODEL_SCALE,
        "output_scale": 1.0,
        "lse_base": "e",
        "rescale_threshold": 2.5,
        "p_prescale_log2": 0.0,
    }
    assert (
        set(document["errors"])
        == set(document["bounds"])
        >= {
            "kernel_vs_modelled_out_bf16",
            "kernel_vs_exact_out_bf16",
            "lse_vs_exact",
            "poisoned_memory",
        }
    )
    ((_, problem),) = SEEN
    assert problem.plan.splits == 3
    assert problem.spec.layout.page_padding > 0


def problem_of(store: Path, mask: str, *options: str | int) -> tuple[Problem, dict[str, Any]]:
    """The problem that `run` makes for a kernel of this mask, and its JSON."""
    config = GOOD.with_axes(mask=mask)
    publish_sample(store, config)
    done = mlakern("run", config.name, "--store", store, "--json", *options)
    assert done.exit_code == 0, done.output
    ((_, problem),) = SEEN
    document: dict[str, Any] = json.loads(done.stdout)["problem"]
    return problem, document


def test_values_of_masks(store: Path) -> None:
    lengths = ("--seq-lens", "9,300", "--seq-len-q", 2)
    problem, document = problem_of(
        store, "window", *lengths, "--window-left", 5, "--no-causal", "--multiprocessors", 4
    )
    assert (document["window_left"], document["causal"]) == (5, False)
    assert (problem.plan.window_left, problem.plan.multiprocessors) == (5, 4)
    assert problem.attention.visible.tolist() == [[[2, 9], [3, 9]], [[293, 300], [294, 300]]]

    dcp = ("--cp-world", 3, "--cp-rank", 1, "--cp-interleave", 2)
    problem, document = problem_of(store, "dcp", *lengths, *dcp)
    assert [document[name] for name in ("cp_world", "cp_rank", "cp_interleave")] == [3, 1, 2]
    # Of nine keys rank 1 holds 2, 3 and 8; token 0 sees keys below 8.
    assert [len(keys) for keys in problem.attention.keys] == [3, 100]
    assert problem.attention.visible[0].tolist() == [[0, 2], [0, 3]]
    assert problem.fields["causal_seqs"].array().tolist() == [9, 300]
    assert problem.fields["seq_lens"].array().tolist() == [3, 100]

    problem, document = problem_of(store, "visible", *lengths, "--seed", 3)
    assert problem.fields["local_visible_lens"].array().tolist() == document["visible_lens"]
    assert problem.attention.visible[..., 1].tolist() == document["visible_lens"]
    assert "window_left" not in document


def test_splits_of_each_request(store: Path) -> None:
    options = ("--seq-lens", "9,700", "--splits", 3, "--block-split-kvs", "2,9")
    problem, document = problem_of(store, "causal", *options)
    assert document["block_split_kvs"] == [2, 9]
    assert problem.fields["block_split_kvs"].array().tolist() == [2, 9]
    assert [len(of_request[0]) for of_request in problem.division.runs] == [1, 3]


def test_all_runs_what_the_store_serves(store: Path) -> None:
    done = mlakern("run", "--all", "--store", store, "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 1
    assert document["status"] == "fail"
    statuses = {result["name"]: result["status"] for result in document["results"]}
    assert statuses == {GOOD.name: "pass", WRONG.name: "fail"}
    chosen = mlakern("run", "--all", "--page-size", "64", "--store", store)
    assert chosen.exit_code == 0
    assert chosen.stdout.splitlines()[-1] == "PASS"
    assert WRONG.name not in chosen.stdout


def test_all_of_nothing_is_no_pass(store: Path, tmp_path: Path) -> None:
    done = mlakern("run", "--all", "--store", tmp_path / "empty")
    assert done.exit_code == 3
    assert f"no such kernel in {tmp_path}/empty, " in done.stderr
    assert mlakern("run", "--all", "--store", store, "--mask", "plain").exit_code == 3


def test_all_names_a_damaged_kernel(store: Path) -> None:
    (manifest,) = store.glob(f"{WRONG.name}-*/manifest.json")
    manifest.write_text("{")
    done = mlakern("run", "--all", "--store", store)
    assert done.exit_code == 0
    assert f"passed over: {manifest}: manifest: not JSON" in done.stderr


def test_a_missing_cubin_is_no_pass(store: Path) -> None:
    (cubin,) = store.glob(f"{GOOD.name}-*/kernel.cubin")
    cubin.unlink()
    done = mlakern("run", GOOD.name, "--store", store, "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["status"] == "fail"
    assert document["reason"].startswith(f"{cubin}: No such file or directory")
    assert SEEN == []


def test_a_problem_larger_than_memory_cannot_run(store: Path) -> None:
    done = mlakern("run", GOOD.name, "--store", store, "--seq-lens", "2000000000", "--json")
    assert done.exit_code == 3
    assert (
        json.loads(done.stdout)["reason"] == "no memory for 2000000000 keys; try shorter seq_lens"
    )


@pytest.mark.parametrize(
    ("options", "races"),
    [
        ((), True),
        (("--no-races",), False),
        (("--seq-lens", "4000"), False),
        (("--seq-lens", "4000", "--races"), True),
    ],
)
def test_races_are_looked_for_in_small_problems(
    store: Path, options: tuple[str, ...], races: bool
) -> None:
    assert mlakern("run", GOOD.name, "--store", store, *options).exit_code == 0
    ((backend, _),) = SEEN
    assert backend.races is races


def test_one_that_cannot_run_is_no_pass_of_all(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuBackend, "multiprocessors", 132)
    monkeypatch.setattr(GpuBackend, "execute", execute)
    monkeypatch.setattr(
        GpuBackend, "unavailable_reason", lambda _, config: "absent" if config == WRONG else None
    )
    done = mlakern("run", "--all", "--backend", "gpu", "--store", store, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["status"]) == (3, "unavailable")
    assert {r["name"]: r["status"] for r in document["results"]} == {
        GOOD.name: "pass",
        WRONG.name: "unavailable",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "need CONFIG, axes such as --page-size 64, or --all"),
        (("nonsense",), "configuration name 'nonsense'"),
        ((GOOD.name, "--all"), "CONFIG excludes --all"),
        ((GOOD.name, "--page-size", "64"), "CONFIG excludes page_size"),
        (("--page-size", "63"), "page_size: got 63, need one of 16, 32, 64, 128"),
        (("--mask", "diagonal"), "mask: got 'diagonal', need one of plain, causal, window"),
        ((GOOD.name, "--multiprocessors", "0"), "multiprocessors: got 0, need an integer from 1"),
        ((GOOD.name, "--seq-lens", "3,x"), "got '3,x', need integers separated by commas"),
        ((GOOD.name, "--heads", "129"), "num_heads: got 129, need an integer from 1 to 128"),
        ((GOOD.name, "--backend", "tpu"), "'tpu'"),
        ((GOOD.name, "--block-split-kvs", "1"), "block_split_kvs: got 1 numbers, need 2"),
        ((GOOD.name, "--host-work-list"), "host_work_list: got a kernel of schedule grid, need"),
    ],
)
def test_usage_errors(store: Path, arguments: tuple[str, ...], message: str) -> None:
    done = mlakern("run", *arguments, "--store", store)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_spec_that_the_arguments_refuse_is_a_usage_error(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: EmulatorBackend, entry: backends.Entry, problem: Problem) -> Any:
        backends.launches_of(entry.manifest, problem, backends.place(problem.buffers), "cuda:0")

    monkeypatch.setattr(EmulatorBackend, "execute", refuse)
    done = mlakern("run", GOOD.name, "--store", store, "--rescale-threshold", "9")
    assert done.exit_code == 2
    assert "rescale_threshold: got 9.0 + p_prescale_log2 0.0, need a sum <=" in done.stderr


def test_auto_takes_the_gpu_if_it_can_run_the_kernel(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuBackend, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(GpuBackend, "multiprocessors", 132)
    monkeypatch.setattr(GpuBackend, "execute", execute)
    done = mlakern("run", GOOD.name, "--store", store, "--seq-lens", "8192", "--json")
    assert json.loads(done.stdout)["backend"] == "gpu"
    ((backend, problem),) = SEEN
    assert isinstance(backend, GpuBackend)
    assert problem.plan.splits == 32
    told = mlakern("run", GOOD.name, "--store", store, "--backend", "emulator", "--json")
    assert json.loads(told.stdout)["backend"] == "emulator"


def test_plan_prints_what_the_planner_decides() -> None:
    done = mlakern("plan", "--seq-lens", "130,8192", "--heads", "96", "--seq-len-q", "4", "--json")
    assert done.exit_code == 0
    made = plan(
        KernelConfig(pack_q=True), [130, 8192], num_heads=96, seq_len_q=4, multiprocessors=148
    )
    assert json.loads(done.stdout) == made.as_dict()
    assert made.as_dict()["grids"] == {"attention": [6, 11, 2], "combine": [384, 2, 1]}


def test_plan_by_batch_and_longest_and_as_a_table() -> None:
    done = mlakern("plan", GOOD.name, "--batch", "4", "--max-seq-len", "4096", "--heads", "16")
    assert done.exit_code == 0
    for fact in ("splits", "16", "2 × 16 × 4", "4, up to 4096 keys"):
        assert fact in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "seq_lens: got none, need host lengths, or batch= and max_seq_len="),
        (("--seq-lens", "5", "--heads", "300"), "num_heads: got 300, need an integer from 1 to"),
        (("--seq-lens", "5", "--splits", "0"), "splits: got 0"),
        (("--seq-lens", "5", "--tile-m", "64", "--no-pack-q"), "num_heads: got 128 with tile_m 64"),
        (("--seq-lens", "5", "--mask", "window"), "window_left: got -1, need 0 to"),
    ],
)
def test_plan_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    done = mlakern("plan", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_plan_needs_no_numpy() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; sys.argv = ['mlakern', 'plan', '--seq-lens', "
        "'5', '--json']; from mlakern.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["splits"] == 1

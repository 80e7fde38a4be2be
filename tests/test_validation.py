"""Problems are poisoned as promised, and every bound of a comparison can fail."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from manifests import sample_manifest

from mlakern.config import KernelConfig
from mlakern.launch_rules import workspace_rule
from mlakern.manifest import Manifest
from mlakern.reference import Numerics, Result, exact, modelled
from mlakern.tensormap import TensorMap
from mlakern.validation.backends import launches_of, mapped_ranges, place
from mlakern.validation.buffers import Buffer
from mlakern.validation.compare import BOUNDS, Measured, Output, compare
from mlakern.validation.problem import Problem, make_problem
from mlakern.validation.run import validate
from mlakern.validation.spec import LAYOUTS, ProblemSpec


def problem(spec: ProblemSpec, config: KernelConfig | None = None) -> Problem:
    config = config or KernelConfig()
    return make_problem(spec, config, spec.plan(config, multiprocessors=148))


SPEC = ProblemSpec(num_heads=3, seq_len_q=2, seq_lens=(130, 0, 300, 64))
NAN_CODES = {0x7F, 0xFF}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("page_size", [16, 64])
def test_live_keys_are_where_the_page_table_says_and_all_else_is_nan(
    layout: str, page_size: int
) -> None:
    p = problem(replace(SPEC, layout=LAYOUTS[layout]), KernelConfig(page_size=page_size))
    latent, rope = p.fields["c_latent"].array(), p.fields["c_rope"].array()
    table = p.fields["block_tables"].array()
    alive = np.zeros(latent.shape[:2], bool)
    for b, length in enumerate(SPEC.seq_lens):
        for k in range(length):
            page, row = table[b, k // page_size], k % page_size
            alive[page, row] = True
            got = np.concatenate([latent[page, row], rope[page, row]])
            wanted = p.attention.keys[b][k]
            assert np.array_equal(got.view(ml_dtypes.float8_e4m3fn).astype(np.float32), wanted)
    assert alive.sum() == sum(SPEC.seq_lens)
    assert set(latent[~alive].ravel().tolist()) == NAN_CODES
    assert set(rope[~alive].ravel().tolist()) == NAN_CODES
    assert not np.isin(latent[alive], list(NAN_CODES)).any()


def test_page_tables_are_shuffled_and_end_in_dead_pages() -> None:
    p = problem(replace(SPEC, layout=LAYOUTS["padded"]))
    field = p.fields["block_tables"]
    table = field.array()
    used = [list(table[b, : -(-n // 64)]) for b, n in enumerate(SPEC.seq_lens)]
    flat = list(itertools.chain(*used))
    assert len(set(flat)) == len(flat)
    assert flat != sorted(flat)
    tails = {int(v) for b, row in enumerate(table) for v in row[len(used[b]) :]}
    assert tails == {-1, 2147480000}
    # Only the entries in use exist for the emulator.
    sizes = [piece.stop - piece.start for piece in field.buffer.pieces]
    assert sizes == [4 * len(pages) for pages in used if pages]


def test_outputs_start_as_nan_and_queries_keep_their_gaps_poisoned() -> None:
    p = problem(replace(SPEC, layout=LAYOUTS["padded"], splits=2))
    assert np.isnan(p.fields["out"].array().astype(np.float32)).all()
    assert np.isnan(p.fields["lse"].array()).all()
    assert (p.fields["workspace"].buffer.image == 0xFF).all()
    query = p.fields["q_latent"]
    assert query.strides == (2 * (3 * 576 + 48), 3 * 576 + 48, 576, 1)
    image = query.buffer.image.reshape(4, 2, 3 * 576 + 48)
    assert set(image[..., 3 * 576 :].ravel().tolist()) == NAN_CODES
    assert np.isfinite(p.attention.query).all()


def test_the_same_seed_gives_the_same_bytes_and_another_does_not() -> None:
    first, again = problem(SPEC), problem(SPEC)
    other = problem(replace(SPEC, seed=1))
    for a, b in zip(first.buffers, again.buffers, strict=True):
        assert np.array_equal(a.image, b.image)
    assert not np.array_equal(first.buffers[0].image, other.buffers[0].image)


def test_ramp_raises_the_maximum_from_tile_to_tile() -> None:
    p = problem(ProblemSpec(seq_lens=(512,), num_heads=4, values="ramp"))
    a = p.attention
    scores = a.query[0, 0] @ a.keys[0].T * a.softmax_scale * math.log2(math.e)
    tops = scores.reshape(4, 4, 128).max(axis=2)
    rises = np.diff(tops, axis=1)
    assert (rises > 0).mean() > 0.7
    assert rises.mean() == pytest.approx(2.9, abs=1)


def test_flat_makes_all_scores_equal_and_values_of_mean_one() -> None:
    p = problem(ProblemSpec(seq_lens=(2000,), values="flat"))
    a = p.attention
    assert not (a.query[0, 0] @ a.keys[0].T).any()
    assert a.keys[0][:, :512].mean() == pytest.approx(1, abs=0.01)


def test_ranks_hold_every_key_once_under_the_same_queries() -> None:
    whole = problem(SPEC)
    spec = replace(SPEC, cp_world=3, cp_interleave=4)
    ranks = [problem(replace(spec, cp_rank=r), KernelConfig(mask="dcp")) for r in range(3)]
    for b, keys in enumerate(whole.attention.keys):
        # Global key g is key (g // 12) * 4 + g % 4 of rank g // 4 % 3.
        for g, key in enumerate(keys):
            held = ranks[g // 4 % 3].attention.keys[b]
            assert np.array_equal(held[g // 12 * 4 + g % 4], key)
        assert sum(len(rank.attention.keys[b]) for rank in ranks) == len(keys)
    for rank in ranks:
        assert np.array_equal(rank.attention.query, whole.attention.query)
        assert rank.fields["causal_seqs"].array().tolist() == list(SPEC.seq_lens)


def test_visible_lengths_hold_none_all_and_some() -> None:
    spec = replace(SPEC, seq_len_q=8, seq_lens=(500,) * 8)
    drawn = np.array(spec.visible())
    assert drawn.shape == (8, 8)
    assert ((drawn == 0).sum() > 8) and ((drawn == 500).sum() > 8)
    assert (((drawn > 0) & (drawn < 500)).sum() > 8) and drawn.max() <= 500
    assert spec.visible() == replace(spec, num_heads=9).visible()
    assert spec.visible() != replace(spec, seed=1).visible()


def test_a_work_list_of_the_host_is_an_array_of_its_own() -> None:
    config = KernelConfig(schedule="work_list")
    p = problem(replace(SPEC, host_work_list=True), config)
    assert p.fields["work_list"].array().tolist() == p.plan.work_list(SPEC.seq_lens)
    assert "work_list" not in problem(SPEC, config).fields
    with pytest.raises(ValueError, match=r"^block_split_kvs: got 2 numbers, need 4"):
        problem(replace(SPEC, block_split_kvs=(1, 2)))


def test_an_unknown_kind_of_values() -> None:
    with pytest.raises(ValueError, match=r"^values: got 'zeros', need one of random, ramp, flat"):
        problem(replace(SPEC, values="zeros"))


# A reference result and what a perfect kernel would leave.
ATTENTION = problem(SPEC).attention
EXACT = exact(ATTENTION)
MODEL = modelled(ATTENTION, Numerics())


def perfect() -> Output:
    return Output(MODEL.out.astype(ml_dtypes.bfloat16), "bfloat16", MODEL.lse.astype(np.float32))


def failing(output: Output, exact_result: Result = EXACT, model: Result = MODEL) -> set[str]:
    return {m.name for m in compare(output, exact_result, model) if not m.passed}


def test_the_model_itself_passes() -> None:
    assert failing(perfect()) == set()
    assert {m.name for m in compare(perfect(), EXACT, MODEL)} == {
        name for name in BOUNDS if "e4m3" not in name
    }


def test_one_nan_fails_every_comparison_of_out() -> None:
    output = perfect()
    output.out[2, 1, 0, 17] = np.nan
    assert failing(output) == {
        "poisoned_memory",
        "kernel_vs_modelled_out_bf16",
        "kernel_vs_exact_out_bf16",
        "kernel_vs_exact_out_bf16_row",
    }


def test_one_wrong_row_fails_row_by_row_only() -> None:
    big = Result(np.ones((1, 1, 128, 512)), np.zeros((1, 1, 128)))
    out = np.ones((1, 1, 128, 512), ml_dtypes.bfloat16)
    out[0, 0, 5] = 1.25
    output = Output(out, "bfloat16", None)
    got = {m.name: m for m in compare(output, big, big)}
    assert got["kernel_vs_exact_out_bf16_row"].error == 0.25
    assert not got["kernel_vs_exact_out_bf16_row"].passed
    assert got["kernel_vs_exact_out_bf16"].error == pytest.approx(0.25 / math.sqrt(128))
    assert got["kernel_vs_exact_out_bf16"].passed
    assert not got["kernel_vs_modelled_out_bf16"].passed


def test_a_value_in_an_empty_row_fails() -> None:
    output = perfect()
    output.out[1, 0, 2, 3] = 1e-30
    assert "kernel_vs_exact_out_bf16_row" in failing(output)


@pytest.mark.parametrize(
    ("at", "value", "names"),
    [
        ((0, 0, 0), lambda v: v + 0.0021, {"lse_vs_exact"}),
        ((0, 0, 0), lambda v: v + 0.0019, set()),
        ((0, 0, 0), lambda _: -np.inf, {"lse_vs_exact", "poisoned_memory"}),
        ((1, 0, 0), lambda _: np.inf, {"lse_vs_exact", "poisoned_memory"}),
        ((1, 0, 0), lambda _: -1e30, {"lse_vs_exact"}),
        ((0, 1, 2), lambda _: np.nan, {"lse_vs_exact", "poisoned_memory"}),
    ],
)
def test_lse_bounds(at: tuple[int, ...], value: Any, names: set[str]) -> None:
    output = replace(perfect(), lse=EXACT.lse.astype(np.float32))
    assert output.lse is not None
    output.lse[at] = value(output.lse[at])
    assert failing(output) == names


def test_bytes_written_outside_the_rows_fail() -> None:
    assert failing(replace(perfect(), stray_bytes=1)) == {"written_outside_rows"}


def test_e4m3_steps_are_counted_in_codes() -> None:
    model = modelled(ATTENTION, Numerics(out_dtype="float8_e4m3fn"))
    codes = model.out.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert failing(Output(codes.copy(), "float8_e4m3fn", None), model=model) == set()
    row = np.abs(model.out[0, 0, 0])
    largest, smallest = int(row.argmax()), int(row.argmin())

    def moved(column: int, steps: int) -> set[str]:
        changed = codes.copy()
        changed[0, 0, 0, column] += steps
        return failing(Output(changed, "float8_e4m3fn", None), model=model)

    assert moved(largest, 1) == moved(largest, 2) == set()
    assert moved(largest, 3) == {"kernel_vs_modelled_out_e4m3_steps"}
    # Far below the row's maximum a value may be further away, as long as such values are few.
    assert moved(smallest, 3) == set()
    many = codes.copy()
    many.reshape(-1)[: many.size // 500] ^= 2
    # "Far below" begins at 2^-4 of it.
    ratios = row / row.max()
    above, below = (int(np.argmin(np.abs(ratios - ratio))) for ratio in (0.08, 0.05))
    assert ratios[above] > 1 / 16 > ratios[below]
    assert moved(above, 3) == {"kernel_vs_modelled_out_e4m3_steps"}
    assert moved(below, 3) == set()
    assert "kernel_vs_modelled_out_e4m3_beyond_one_step" in failing(
        Output(many, "float8_e4m3fn", None), model=model
    )


def test_signs_of_zero_are_no_step() -> None:
    zeros = Result(np.zeros((1, 1, 1, 512)), np.zeros((1, 1, 1)))
    codes = np.full((1, 1, 1, 512), 0x80, np.uint8)
    codes[..., 0] = 1
    got = {m.name: m.error for m in compare(Output(codes, "float8_e4m3fn", None), zeros, zeros)}
    assert got["kernel_vs_modelled_out_e4m3_beyond_one_step"] == 0


def test_a_nan_error_is_not_a_pass() -> None:
    assert not Measured("lse_vs_exact", math.nan).passed


@dataclass(frozen=True)
class FakeEntry:
    manifest: Manifest

    def load_cubin(self, driver_version: int | None = None) -> bytes:
        raise AssertionError(driver_version)

    def load_ptx(self) -> str:
        raise AssertionError


@dataclass(frozen=True)
class ModelBackend:
    """Computes the model from the launch's own parameters: what the kernel would read."""

    offset: float = 0.0
    name: str = "model"
    multiprocessors: int = 148

    def unavailable_reason(self, config: KernelConfig) -> str | None:
        return None if config.arch == "sm_100a" else "not made for it"

    def execute(self, entry: FakeEntry, p: Problem) -> Output:
        (launch, *_) = launches_of(entry.manifest, p, place(p.buffers), "cuda:0")
        maps = [v for v in launch.parameters if isinstance(v, TensorMap)]
        assert [m.extents[0] for m in maps] == [512, 64, 512, 64]
        config = entry.manifest.config
        result = modelled(p.attention, Numerics(out_dtype=config.out_dtype), p.division)
        out = (result.out + self.offset).astype(ml_dtypes.bfloat16)
        return Output(out, "bfloat16", result.lse.astype(np.float32))


def fake_entry(config: KernelConfig | None = None) -> FakeEntry:
    config = config or KernelConfig()
    return FakeEntry(replace(sample_manifest(config), workspace=workspace_rule(config)))


def test_validate_passes_and_fails_by_value() -> None:
    spec = replace(SPEC, splits=2)
    good = validate(fake_entry(), spec, ModelBackend())
    assert (good.status, good.reason) == ("pass", "")
    assert all(m.passed for m in good.errors)
    bad = validate(fake_entry(), spec, ModelBackend(offset=0.01))
    assert bad.status == "fail"
    assert "kernel_vs_modelled_out_bf16" in bad.reason
    document = bad.as_dict()
    assert document["problem"]["seq_lens"] == [130, 0, 300, 64]
    assert document["errors"]["kernel_vs_modelled_out_bf16"] > 4e-3
    assert document["bounds"]["kernel_vs_modelled_out_bf16"] == 4e-3


def test_validate_says_why_it_cannot_run() -> None:
    class Nowhere(ModelBackend):
        def unavailable_reason(self, config: KernelConfig) -> str | None:
            return f"no device for {config.arch}"

    report = validate(fake_entry(), SPEC, Nowhere())
    assert (report.status, report.errors) == ("unavailable", ())
    assert report.reason.startswith("no device for sm_100a")


def test_validate_reports_a_fault_of_the_kernel_as_a_failure() -> None:
    from mlakern.emulator.errors import DeadlockError

    class Stuck(ModelBackend):
        def execute(self, entry: FakeEntry, p: Problem) -> Output:
            raise DeadlockError(f"warp 3 waits {entry.manifest.config.arch} {len(p.buffers)}")

    report = validate(fake_entry(), SPEC, Stuck())
    assert report.status == "fail"
    assert report.reason.startswith("warp 3 waits")


def test_buffers_are_placed_apart_and_aligned() -> None:
    buffers = problem(replace(SPEC, splits=3)).buffers
    addresses = place(buffers)
    spans = sorted((addresses[b.name], addresses[b.name] + b.image.nbytes) for b in buffers)
    assert all(end + 4096 <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(a % 256 == 0 and a > 1 << 32 for a in addresses.values())


def test_mapped_ranges_hold_the_pieces_and_little_else() -> None:
    pieces = (slice(0, 20), slice(24, 40), slice(52, 60), slice(100, 104))
    buffer = Buffer("table", np.zeros(110, np.uint8), pieces=pieces)
    assert mapped_ranges(buffer) == [(0, 40), (48, 60), (96, 104)]
    assert mapped_ranges(Buffer("whole", np.zeros(9, np.uint8))) == [(0, 9)]


def test_a_pool_above_four_gibibytes_costs_only_its_pages() -> None:
    layout = replace(LAYOUTS["joined"], page_padding=1 << 30)
    p = problem(ProblemSpec(seq_lens=(130,), num_heads=1, layout=layout))
    cache = p.fields["c_latent"]
    assert cache.buffer.image.nbytes > 1 << 32
    assert cache.strides[0] > 1 << 30
    # The pool's pages are 6 of 36 KiB; the rest exists nowhere.
    assert [piece.stop - piece.start for piece in cache.buffer.pieces] == [64 * 576] * 6

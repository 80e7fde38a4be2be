"""The real kernels, end to end: runtime arguments, PTX on the emulator, both references.

Every case runs on poisoned memory: NaN in all cache bytes outside the live keys, dead page table
entries, outputs and workspace filled with NaN, page table rows that end at the last page in use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from kernel_cases import Case, Find, scalars

from mlakern.config import KernelConfig
from mlakern.manifest import Manifest
from mlakern.reference import exact, merge
from mlakern.validation.backends import EmulatorBackend
from mlakern.validation.compare import Output
from mlakern.validation.problem import make_problem
from mlakern.validation.run import validate
from mlakern.validation.spec import LAYOUTS, ProblemSpec

CAUSAL = KernelConfig()
PLAIN = KernelConfig(mask="plain")
PACKED = KernelConfig(pack_q=True)
PAGES_16 = KernelConfig(page_size=16, partial_dtype="float16")
PAGES_32 = KernelConfig(page_size=32, mask="plain", out_dtype="float8_e4m3fn")
PAGES_128 = KernelConfig(page_size=128, pack_q=True, partial_dtype="float16")
E4M3_SPLIT = KernelConfig(page_size=128, partial_dtype="float16", out_dtype="float8_e4m3fn")

# Lengths around a key tile (128) and around the end of a page.
EDGES = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)

CASES = [
    Case("one request of one key", lengths=(1,)),
    Case("empty requests", lengths=(0, 130, 0)),
    Case("a batch of nothing", lengths=(0,)),
    Case("empty requests and splits", lengths=(0, 300), splits=3, tokens=2),
    Case("fewer keys than tokens", tokens=4, lengths=(0, 1, 2, 3, 4, 5)),
    Case("fewer keys than tokens, plain", PLAIN, tokens=4, lengths=(1, 3)),
    Case("edges of pages of 64", heads=1, lengths=EDGES),
    Case("edges of pages of 16", PAGES_16, heads=1, lengths=EDGES),
    Case("edges of pages of 32", PAGES_32, heads=2, lengths=EDGES),
    Case("edges of pages of 128", PAGES_128, heads=3, lengths=EDGES),
    Case("causal edge crosses a tile", tokens=4, heads=8, lengths=(129, 130, 131, 257)),
    Case("causal edge crosses a tile, split", tokens=4, heads=8, lengths=(129, 258), splits=2),
    Case("one head", heads=1, tokens=3),
    Case("six heads folded", heads=6, tokens=4),
    Case("a full folded tile", heads=32, tokens=4, lengths=(140,)),
    Case("96 heads folded", heads=96, tokens=2, lengths=(140,)),
    Case("96 heads packed across tokens", PACKED, heads=96, tokens=4, lengths=(140,)),
    Case("packed rows in one tile", PACKED, heads=6, tokens=3),
    Case("packed with a tile of one row", PACKED, heads=43, tokens=3, lengths=(140,)),
    Case("128 heads", heads=128, lengths=(257, 128)),
    Case("128 heads and splits", heads=128, tokens=2, lengths=(257, 64), splits=2),
    Case("the planner's splits", lengths=(700, 90), splits=None),
    Case("more splits than tiles", lengths=(300, 130), splits=5),
    Case("uneven runs", lengths=(128 * 5 + 1, 128 * 3), splits=3),
    Case("half partials", PAGES_16, tokens=2, lengths=(300,), splits=3),
    Case("half partials, packed", PAGES_128, heads=96, tokens=4, lengths=(300,), splits=2),
    Case("e4m3 output", PAGES_32, tokens=2),
    Case("e4m3 output of splits", E4M3_SPLIT, lengths=(300, 0, 140), splits=2),
    Case("e4m3 saturates", E4M3_SPLIT, lengths=(9,), more={"scalars": scalars(output_scale=900.0)}),
    Case("no LSE wanted", splits=2, more={"want_lse": False}),
    Case("no LSE wanted, one split", more={"want_lse": False}),
    Case("LSE to base e", tokens=2, more={"scalars": scalars(lse_base="e", output_scale=0.5)}),
    Case(
        "LSE to base e of splits",
        splits=3,
        more={"scalars": scalars(lse_base="e", output_scale=3.0)},
    ),
    Case("separate tensors", tokens=2, more={"layout": LAYOUTS["separate"]}),
    Case("padded tensors", tokens=4, heads=6, splits=2, more={"layout": LAYOUTS["padded"]}),
    Case("padded tensors of packed rows", PACKED, heads=48, tokens=3, lengths=(140,), more={
        "layout": replace(LAYOUTS["padded"], token_padding=0),
    }),
    Case("padded tokens in a full tile", heads=64, tokens=2, lengths=(140,), more={
        "layout": LAYOUTS["padded"],
    }),
    Case("a pool above 4 GiB", lengths=(300,), more={
        "layout": replace(LAYOUTS["joined"], page_padding=(1 << 30) + 16),
    }),
    Case("a rising maximum", lengths=(900,), more={"values": "ramp"}),
    Case("a rising maximum that never lags", lengths=(900,), more={
        "values": "ramp", "scalars": scalars(rescale_threshold=0.0),
    }),
    Case("a rising maximum, split", lengths=(900,), splits=3, tokens=2, more={
        "values": "ramp", "scalars": scalars(rescale_threshold=4.0, p_prescale_log2=4.0),
    }),
    Case("probabilities lifted", more={
        "scalars": scalars(rescale_threshold=0.0, p_prescale_log2=8.5),
    }),
    Case("a steep softmax", tokens=2, more={"scalars": scalars(softmax_scale=1.0)}),
    Case("a flat softmax of 8192 keys", heads=2, lengths=(8192,), more={"values": "flat"}),
    Case("a flat softmax of 32768 keys", heads=1, lengths=(32768,), more={"values": "flat"}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_values(case: Case, find_kernel: Find) -> None:
    case.check(find_kernel)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_late_copies_and_shuffled_warps_change_nothing(seed: int, find_kernel: Find) -> None:
    ramp = Case("ramp", tokens=2, lengths=(700,), more={"values": "ramp"}, seed=seed)
    ramp.check(find_kernel)


# The race detector costs some times the run: one case for each way through the kernel.
RACED = [
    Case("ring reuse", lengths=(700,), more={"values": "ramp"}),
    Case("tail and splits", tokens=2, lengths=(300, 0), splits=2),
    Case("packed rows", PAGES_128, heads=43, tokens=3, lengths=(270,)),
    Case("e4m3 split", E4M3_SPLIT, lengths=(140,), splits=2),
]


@pytest.mark.parametrize("case", RACED, ids=lambda case: case.what)
def test_no_races(case: Case, find_kernel: Find) -> None:
    replace(case, races=True).check(find_kernel)


@dataclass(frozen=True)
class Disguised:
    """A kernel under the manifest of another one."""

    manifest: Manifest
    ptx: str

    def load_cubin(self, driver_version: int | None = None) -> bytes:
        raise AssertionError(driver_version)

    def load_ptx(self) -> str:
        return self.ptx


def test_a_kernel_with_another_mask_fails(find_kernel: Find) -> None:
    """The cases above can fail: two keys too many for one of three tokens are enough."""
    causal, plain = find_kernel(CAUSAL), find_kernel(PLAIN)
    swapped = Disguised(causal.manifest, plain.load_ptx())
    spec = ProblemSpec(num_heads=16, seq_len_q=3, seq_lens=(300,), splits=1)
    report = validate(swapped, spec, EmulatorBackend())
    assert report.status == "fail"
    assert "lse_vs_exact" in report.reason
    assert "kernel_vs_exact_out_bf16" in report.reason


@pytest.mark.parametrize("fence", ["fence.proxy.async", "tcgen05.wait::ld"])
def test_a_missing_fence_is_found(fence: str, find_kernel: Find) -> None:
    """The race tests above can fail: the same kernel without one kind of synchronisation does."""
    entry = find_kernel(CAUSAL)
    lines = entry.load_ptx().splitlines()
    kept = [line for line in lines if not line.strip().startswith(fence)]
    assert len(kept) < len(lines)
    broken = Disguised(entry.manifest, "\n".join(kept))
    spec = ProblemSpec(num_heads=16, seq_lens=(300,), values="ramp", splits=1)
    report = validate(broken, spec, EmulatorBackend(races=True))
    assert report.status == "fail"
    assert f"missing: {fence}" in report.reason


def run(find_kernel: Find, config: KernelConfig, spec: ProblemSpec) -> Output:
    plan = spec.plan(config, multiprocessors=148)
    return EmulatorBackend().execute(find_kernel(config), make_problem(spec, config, plan))


def test_splits_change_rounding_only(find_kernel: Find) -> None:
    """One run, uneven runs and runs with an empty trailing one agree with each other."""
    spec = ProblemSpec(num_heads=4, seq_len_q=2, seq_lens=(650, 3))
    whole = run(find_kernel, CAUSAL, replace(spec, splits=1))
    for splits in (2, 4, 7):
        parts = run(find_kernel, CAUSAL, replace(spec, splits=splits))
        difference = parts.out.astype(np.float64) - whole.out.astype(np.float64)
        # P is rounded against another maximum in another run: noise of e4m3, averaged over keys.
        assert np.linalg.norm(difference) / np.linalg.norm(whole.out.astype(np.float64)) < 3e-2
        assert parts.lse is not None
        assert whole.lse is not None
        np.testing.assert_allclose(parts.lse, whole.lse, atol=1e-4)


def test_results_over_disjoint_keys_merge_by_lse(find_kernel: Find) -> None:
    """Two calls over halves of the keys, merged on the host, are the call over all of them."""
    spec = ProblemSpec(num_heads=3, seq_lens=(200, 150), splits=1)
    problem = make_problem(spec, PLAIN, spec.plan(PLAIN, multiprocessors=148))
    # Both requests see the first request's query: their keys are two shards of one request.
    query = problem.fields["q_latent"].buffer.image.reshape(2, -1)
    query[1] = query[0]
    output = EmulatorBackend().execute(find_kernel(PLAIN), problem)
    assert output.lse is not None
    merged = merge(list(output.out.astype(np.float64)), list(output.lse.astype(np.float64)))
    a = problem.attention
    keys = np.concatenate(a.keys)
    want = exact(replace(a, query=a.query[:1], keys=[keys], visible=np.array([[[0, len(keys)]]])))
    error = np.linalg.norm(merged.out - want.out[0]) / np.linalg.norm(want.out)
    assert error < 3e-2
    np.testing.assert_allclose(merged.lse, want.lse[0], atol=1e-4)


def random_case(seed: int) -> Case:
    """A configuration and a problem drawn at random; small enough for a second or two."""
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    config = pick(CAUSAL, PLAIN, PACKED, PAGES_16, PAGES_32, PAGES_128, E4M3_SPLIT)
    tokens = int(rng.integers(1, 9))
    heads = int(rng.integers(1, 129 if tokens < 3 else 33))
    layout = pick(*LAYOUTS.values())
    if config.pack_q or heads % 2:
        layout = replace(layout, token_padding=0)
    return Case(
        f"seed {seed}",
        config,
        heads,
        tokens,
        lengths=tuple(int(n) for n in rng.integers(0, 400, rng.integers(1, 4))),
        splits=pick(None, 1, 2, 5),
        more={
            "seed": seed,
            "values": pick("random", "ramp"),
            "layout": layout,
            "scalars": scalars(
                rescale_threshold=pick(0.0, 3.0, 8.0), lse_base=pick("2", "e"), output_scale=0.7
            ),
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_problems(seed: int, find_kernel: Find) -> None:
    random_case(seed).check(find_kernel)

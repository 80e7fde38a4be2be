"""The references: `exact` against a loop over keys, `modelled` against `exact` and by hand."""

from __future__ import annotations

import itertools
import math
import time

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mlakern.division import Division
from mlakern.masks import Mask
from mlakern.reference import Attention, Numerics, exact, merge, modelled, round_to

SCALE = 1 / math.sqrt(192)


def attention(
    seq_lens: tuple[int, ...],
    heads: int = 2,
    tokens: int = 1,
    mask: str = "causal",
    seed: int = 0,
    spread: float = 1.0,
) -> Attention:
    rng = np.random.default_rng(seed)
    bounds = [[Mask(mask).bounds(keys, tokens, t) for t in range(tokens)] for keys in seq_lens]
    return Attention(
        query=e4m3(rng.standard_normal((len(seq_lens), tokens, heads, 576)) * spread),
        keys=[e4m3(rng.standard_normal((keys, 576))) for keys in seq_lens],
        visible=np.array(bounds, np.int64).reshape(len(seq_lens), tokens, 2),
        softmax_scale=SCALE,
        output_scale=0.75,
    )


def split(a: Attention, splits: int) -> Division:
    """Every request in this many runs."""
    _, tokens, heads, _ = a.query.shape
    tiles = [range(-(-len(keys) // 128)) for keys in a.keys]
    return Division.even(tiles, [splits] * len(tiles), query_tiles=1, tile_rows=tokens * heads)


def e4m3(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def relative_l2(got: NDArray[np.floating], want: NDArray[np.floating]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def by_definition(a: Attention, b: int, t: int, h: int) -> tuple[list[float], float]:
    """One row from the formula, with Python floats and natural exponentials."""
    lower, upper = (int(v) for v in a.visible[b, t])
    weights = []
    for k in range(lower, upper):
        score = sum(
            float(x) * float(y) for x, y in zip(a.query[b, t, h], a.keys[b][k], strict=True)
        )
        weights.append(math.exp(a.softmax_scale * score))
    total = sum(weights)
    out = [
        a.output_scale
        * sum(w * float(a.keys[b][lower + i][c]) for i, w in enumerate(weights))
        / total
        for c in range(512)
    ]
    return out, math.log(total)


def test_exact_is_the_definition() -> None:
    a = attention((5, 9), tokens=2)
    result = exact(a)
    for b, t, h in itertools.product(range(2), range(2), range(2)):
        out, lse = by_definition(a, b, t, h)
        np.testing.assert_allclose(result.out[b, t, h], out, rtol=1e-12, atol=1e-14)
        assert result.lse[b, t, h] == pytest.approx(lse / math.log(2), rel=1e-13)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("threshold", [0.0, 8.0])
def test_modelled_is_near_exact(splits: int, threshold: float) -> None:
    a = attention((300, 128, 1), heads=5, tokens=2, spread=2.0)
    want = exact(a)
    got = modelled(a, Numerics(rescale_threshold=threshold), split(a, splits))
    assert relative_l2(got.out, want.out) < 2.5e-2
    seen = want.lse > -np.inf
    assert np.abs(got.lse[seen] - want.lse[seen]).max() < 1e-4
    assert (got.lse[~seen] == -np.inf).all()


def test_modelled_without_the_rounding_of_p_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    # P is the only low-precision value left with float32 outputs: kept whole, the tiles, the
    # lagging maximum and the combine must add up to the definition.
    def keep_p(values: NDArray[np.floating], dtype: str) -> NDArray[np.float32]:
        return values.astype(np.float32) if dtype == "float8_e4m3fn" else round_to(values, dtype)

    monkeypatch.setattr("mlakern.reference.round_to", keep_p)
    a = attention((300, 640), heads=3, tokens=2, spread=3.0)
    want = exact(a)
    for splits, threshold in itertools.product((1, 2, 4), (0.0, 3.0, 8.0)):
        numerics = Numerics(rescale_threshold=threshold, out_dtype="float32")
        got = modelled(a, numerics, split(a, splits))
        assert relative_l2(got.out, want.out) < 2e-6
        np.testing.assert_allclose(got.lse, want.lse, atol=5e-6)


def one_dimensional(scores: list[float], values: list[float]) -> Attention:
    """Keys whose scores are the given log2 units and whose column 1 is the given value."""
    keys = np.zeros((len(scores), 576), np.float32)
    keys[:, 575] = scores
    keys[:, 1] = values
    query = np.zeros((1, 1, 1, 576), np.float32)
    query[..., 575] = 1
    visible = np.array([[[0, len(scores)]]])
    return Attention(query, [keys], visible, softmax_scale=math.log(2))


def test_the_maximum_lags_up_to_the_threshold() -> None:
    # The second tile's maximum is 4 above the first one's.
    scores = [0.0] * 128 + [4.0]
    a = one_dimensional(scores, [1.0] * 128 + [0.0])
    # p = 1 and 2^4 against the old maximum: nothing is rounded, the sum is exact.
    kept = modelled(a, Numerics(rescale_threshold=4.0, out_dtype="float32"))
    assert kept.out[0, 0, 0, 1] == np.float32(128) / np.float32(144)
    # 2^-4 after a rescale: still exact powers of two, so the same quotient.
    raised = modelled(a, Numerics(rescale_threshold=3.5, out_dtype="float32"))
    assert raised.out[0, 0, 0, 1] == kept.out[0, 0, 0, 1]
    assert kept.lse[0, 0, 0] == pytest.approx(math.log2(144), abs=1e-6)
    assert raised.lse[0, 0, 0] == pytest.approx(math.log2(144), abs=1e-6)


def test_a_lagging_maximum_saturates_p_and_a_raised_one_does_not() -> None:
    # 2^10 against the old maximum is over e4m3's 448, though the denominator keeps 2^10.
    a = one_dimensional([0.0] * 128 + [10.0], [0.0] * 128 + [1.0])
    kept = modelled(a, Numerics(rescale_threshold=12.0, out_dtype="float32"))
    assert kept.out[0, 0, 0, 1] == pytest.approx(448 / (128 + 1024), rel=1e-6)
    raised = modelled(a, Numerics(rescale_threshold=8.0, out_dtype="float32"))
    assert raised.out[0, 0, 0, 1] == pytest.approx(1024 / (128 + 1024), rel=1e-6)


def test_p_underflows_without_prescale_and_not_with_it() -> None:
    # 2^-11 rounds to zero in e4m3 (smallest subnormal 2^-9); lifted by 8 it does not.
    a = one_dimensional([0.0, -11.0], [0.0, 64.0])
    low = modelled(a, Numerics(out_dtype="float32", rescale_threshold=0.0))
    assert low.out[0, 0, 0, 1] == 0
    lifted = modelled(a, Numerics(out_dtype="float32", rescale_threshold=0.0, p_prescale_log2=8.0))
    assert lifted.out[0, 0, 0, 1] == pytest.approx(64 * 2**-11 / (1 + 2**-11), rel=1e-6)
    assert lifted.lse[0, 0, 0] == pytest.approx(math.log2(1 + 2**-11), abs=1e-6)


def test_p_is_rounded_after_the_denominator_is_summed() -> None:
    # 2^-0.5 = 0.7071 rounds to 0.6875 (steps of 1/16 in [0.5, 1)); the sum keeps 0.7071.
    a = one_dimensional([0.0, -0.5], [0.0, 1.0])
    got = modelled(a, Numerics(out_dtype="float32"))
    assert got.out[0, 0, 0, 1] == pytest.approx(0.6875 / (1 + 2**-0.5), rel=1e-6)


def test_a_row_that_sees_its_first_key_late_takes_that_maximum() -> None:
    # Nothing visible in the first tile, a very negative score later: -inf never becomes a NaN,
    # and the lag does not keep the empty maximum.
    a = one_dimensional([3.0] * 128 + [-100.0], [9.0] * 128 + [2.0])
    late = Attention(a.query, a.keys, np.array([[[128, 129]]]), a.softmax_scale)
    got = modelled(late, Numerics(out_dtype="float32"))
    assert got.out[0, 0, 0, 1] == 2
    assert got.lse[0, 0, 0] == -100


@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_without_keys_is_zero_and_minus_infinity(splits: int) -> None:
    a = attention((0, 1, 200), tokens=3)
    for result in (exact(a), modelled(a, Numerics(), split(a, splits))):
        for b, t in ((0, 0), (0, 2), (1, 0), (1, 1)):
            assert (result.out[b, t] == 0).all()
            assert (result.lse[b, t] == -np.inf).all()
        for b, t in ((1, 2), (2, 0), (2, 2)):
            assert np.isfinite(result.lse[b, t]).all()
            assert (result.out[b, t] != 0).any()


def test_lse_base_e() -> None:
    a = attention((70,))
    natural = Attention(a.query, a.keys, a.visible, a.softmax_scale, lse_base="e")
    np.testing.assert_allclose(exact(natural).lse, exact(a).lse * math.log(2), rtol=1e-14)
    np.testing.assert_allclose(
        modelled(natural, Numerics()).lse, modelled(a, Numerics()).lse * math.log(2), rtol=1e-6
    )


def test_merge_joins_disjoint_key_sets() -> None:
    whole = attention((90,), heads=4)
    want = exact(Attention(whole.query, whole.keys, whole.visible, SCALE))
    parts = [
        exact(Attention(whole.query, whole.keys, np.array([[[lo, hi]]]), SCALE))
        for lo, hi in ((0, 13), (13, 13), (13, 90))
    ]
    parts[1].out[:] = np.nan  # a partial without keys is never read
    got = merge([p.out for p in parts], [p.lse for p in parts])
    np.testing.assert_allclose(got.out, want.out, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-13)


def test_partials_are_rounded_to_their_type() -> None:
    a = attention((256,), heads=4)
    halves = Numerics(out_dtype="float32", partial_dtype="float16")
    wide = modelled(a, Numerics(out_dtype="float32"), split(a, 2)).out
    narrow = modelled(a, halves, split(a, 2)).out
    error = relative_l2(narrow, wide)
    assert 5e-5 < error < 5e-4  # half precision: 2^-11 at most, about 2e-4 on average


@pytest.mark.parametrize(
    ("rise", "threshold", "moves"),
    [(7.5, 8.0, False), (8.5, 8.0, True), (1.5, 1.0, True), (0.5, 1.0, False), (0.5, 0.0, True)],
)
def test_the_maximum_moves_when_it_is_exceeded_by_more_than_the_threshold(
    rise: float, threshold: float, moves: bool
) -> None:
    """Two tiles whose scores differ by `rise` log2 units; e4m3 rounds 2^rise, but not 2^0."""
    query, keys = np.zeros((1, 1, 1, 576), np.float32), np.zeros((256, 576), np.float32)
    query[..., 512], keys[128:, 512] = 1, 1
    keys[:128, 0], keys[128:, 1] = 1, 1
    a = Attention(query, [keys], np.array([[[0, 256]]]), softmax_scale=rise / math.log2(math.e))
    low, high = (2.0**-rise, 1.0) if moves else (1.0, 2.0**rise)
    total = 128 * low + 128 * high
    wanted = [128 * low / total, 128 * float(e4m3(np.array(high))) / total]
    got = modelled(a, Numerics(rescale_threshold=threshold, out_dtype="float32")).out
    np.testing.assert_allclose(got[0, 0, 0, :2], wanted, rtol=1e-5)
    # The two answers are far enough apart for this to tell them.
    assert abs(float(e4m3(np.array(2.0**rise))) / 2.0**rise - 1) > 0.01


def test_output_types_round_to_nearest_and_saturate() -> None:
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1e6, 3e38])
    assert round_to(values, "bfloat16").tolist()[:2] == [1.0, 1.015625]  # ties to even
    steps = np.array([1.0625, 1.1875, 1e9, -1e9])
    assert round_to(steps, "float8_e4m3fn").tolist() == [1.0, 1.25, 448.0, -448.0]


def test_speed_on_a_full_tile() -> None:
    a = attention((300,), heads=128)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        modelled(a, Numerics(), split(a, 2))
        times.append(time.perf_counter() - start)
    # 3 ms when alone; a loop over rows or keys takes seconds, a busy machine does not decide.
    assert min(times) < 0.5

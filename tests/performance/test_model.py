from __future__ import annotations

from dataclasses import replace

import pytest
import synthetic_sass

from mlakern.config import KernelConfig
from mlakern.kernels.blackwell.layout import PAIR, PAIR_SM_107, SINGLE
from mlakern.performance.disassembly import functions
from mlakern.performance.model import B200, TileWork, clocks, predict, tile_work
from mlakern.performance.profile import MainLoop, main_loops


@pytest.fixture
def loops() -> dict[str, MainLoop]:
    return main_loops(functions(synthetic_sass.text())[synthetic_sass.ENTRY])


class TestTileWork:
    def test_of_a_pair(self, loops: dict[str, MainLoop]) -> None:
        """64 rows and 64 keys a CTA; 18 products read 64 + 64 rows of 32 bytes, 8 read 64 + 128."""
        assert tile_work(PAIR, loops["mma"]) == TileWork(
            ctas=2,
            flops=2 * 64 * 128 * 1088,
            memory_bytes=64 * 576,
            copied_bytes=64 * 576 + 128 * 256,
            operand_bytes=18 * (64 + 64) * 32 + 8 * (64 + 128) * 32,
            p_bytes=64 * 128,
        )

    def test_of_a_single_cta_whose_keys_are_its_values(self, loops: dict[str, MainLoop]) -> None:
        work = tile_work(SINGLE, loops["mma"])
        assert work.copied_bytes == work.memory_bytes == 128 * 576
        assert work.operand_bytes == 18 * (64 + 128) * 32 + 8 * (64 + 256) * 32

    def test_stages_change_nothing(self, loops: dict[str, MainLoop]) -> None:
        assert tile_work(PAIR_SM_107, loops["mma"]) == tile_work(PAIR, loops["mma"])

    def test_a_query_slice_in_the_collector_is_not_read_again(
        self, loops: dict[str, MainLoop]
    ) -> None:
        """64 rows of 32 bytes for one of the products."""
        mma = loops["mma"]
        products = [at for at, i in enumerate(mma.way) if i.name == "UTCQMMA"]
        reusing = list(mma.way)
        product = reusing[products[1]]
        operands = product.operands.replace("gdesc[UR4]", "gdesc[UR4].A_REUSE")
        reusing[products[1]] = replace(product, operands=operands)
        reads = tile_work(PAIR, replace(mma, way=tuple(reusing))).operand_bytes
        assert reads == tile_work(PAIR, mma).operand_bytes - 64 * 32


class TestClocks:
    def test_the_clock_of_the_published_rate(self) -> None:
        """4.5e15 / (148 x 16384) clocks a second; 8e12 / 148 bytes a second for each of them."""
        assert pytest.approx(1.85580e9, rel=1e-5) == B200.clock
        assert pytest.approx(29.1271, rel=1e-5) == B200.memory_bytes

    def test_of_a_pair_by_hand(self, loops: dict[str, MainLoop]) -> None:
        result = clocks(tile_work(PAIR, loops["mma"]), loops, B200)
        assert result == {
            "tensor": 1088.0,  # as many as the columns of both products
            "shared": (69632 + 122880 + 8192) / 128,
            "memory": pytest.approx(36864 / 29.1271, rel=1e-5),
            "mufu": 2 * 128 / 16,
            "fma": 2 * 128 / 128,  # one packed instruction
            "alu": 1 * 128 / 64,
            "convert": 1 * 128 / 64,
            "issue": 11 + 3 + 7,  # softmax, correction, products
        }

    def test_a_single_cta_runs_at_half_the_rate(self, loops: dict[str, MainLoop]) -> None:
        assert clocks(tile_work(SINGLE, loops["mma"]), loops, B200)["tensor"] == 2 * 1088.0


class TestPrediction:
    @pytest.mark.parametrize(
        ("tile_m", "heads", "limit", "bound"),
        [
            # All of the tile's resources are busy however many of its rows exist.
            (128, 16, "shared", 2 * 1568.0),
            (128, 128, "shared", 2 * 1568.0),
            (64, 64, "memory", 73728 / 29.1271),
            # Two query tiles: twice the products, one read of memory.
            (64, 128, "tensor", 2 * 2176.0),
        ],
    )
    def test_what_limits(
        self, loops: dict[str, MainLoop], tile_m: int, heads: int, limit: str, bound: float
    ) -> None:
        prediction = predict(KernelConfig(tile_m=tile_m), loops, heads)
        assert prediction.limit == limit
        assert prediction.bound == pytest.approx(bound, rel=1e-5)
        assert prediction.shares()[limit] == 1.0
        assert max(prediction.shares().values()) == 1.0

    def test_a_batch_takes_as_long_as_its_bytes_where_memory_limits(
        self, loops: dict[str, MainLoop]
    ) -> None:
        prediction = predict(KernelConfig(tile_m=64), loops, 16)
        assert prediction.seconds(64, 8192) == pytest.approx(64 * 8192 * 576 / 8e12)
        # A partly filled last tile is a tile.
        assert prediction.seconds(1, 129) == prediction.seconds(1, 256)

"""What a validation problem is made from: shapes, lengths, masks, division, layout, numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlakern.config import KernelConfig
from mlakern.masks import Mask, local_keys
from mlakern.planning import Plan
from mlakern.planning import plan as make_plan
from mlakern.runtime.arguments import Scalars

# DeepSeek's softmax scale: 1 / sqrt(128 + 64), the head size before absorption.
MODEL_SCALE = 1 / math.sqrt(192)


@dataclass(frozen=True)
class Layout:
    """How the tensors lie in memory; paddings are bytes (table_padding: entries).

    joined: query and cache as rows of 576, else latent and rope as tensors of their own.
    page_padding: after each page. token_padding: after the heads of each query token.
    out_padding: after each row of out. table_padding: after each row of the page table.
    """

    joined: bool = True
    page_padding: int = 0
    token_padding: int = 0
    out_padding: int = 0
    table_padding: int = 0


LAYOUTS = {
    "joined": Layout(),
    "separate": Layout(joined=False),
    "padded": Layout(page_padding=1040, token_padding=48, out_padding=32, table_padding=3),
}
DEFAULT_SCALARS = Scalars(softmax_scale=MODEL_SCALE)
VALUES = ("random", "ramp", "flat")


@dataclass(frozen=True)
class ProblemSpec:
    """What a problem is made from; the same spec gives the same bytes.

    seq_lens: keys of each request; with mask dcp those of all ranks together.
    window_left, causal: mask window. cp_world, cp_rank, cp_interleave: mask dcp.
    visible_lens: mask visible, for each request and token; None: drawn by the seed, 0 and all keys
    among them. A mask looks at its own values only.
    splits: KV runs, None for the planner's choice. block_split_kvs: of each request, up to that.
    host_work_list: the work list is the caller's instead of the device planner's.
    values: "random" normal numbers; "ramp" lets the maximum rise from key tile to key tile, so
    that it lags and is raised; "flat" makes all scores equal and the values' mean 1.
    """

    num_heads: int = 16
    seq_len_q: int = 1
    seq_lens: tuple[int, ...] = (130, 300)
    window_left: int = 128
    causal: bool = True
    cp_world: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1
    visible_lens: tuple[tuple[int, ...], ...] | None = None
    splits: int | None = None
    block_split_kvs: tuple[int, ...] | None = None
    host_work_list: bool = False
    seed: int = 0
    values: str = "random"
    layout: Layout = LAYOUTS["joined"]
    want_lse: bool = True
    scalars: Scalars = DEFAULT_SCALARS

    def mask(self, kind: str) -> Mask:
        """The mask of this kind with the spec's values."""
        if kind == "window":
            return Mask(kind, window_left=self.window_left, causal=self.causal)
        if kind == "dcp":
            return Mask(
                kind,
                cp_world=self.cp_world,
                cp_rank=self.cp_rank,
                cp_interleave=self.cp_interleave,
            )
        return Mask(kind)

    def held_lens(self, kind: str) -> tuple[int, ...]:
        """Keys of each request on this device: what seq_lens holds in a call."""
        if kind != "dcp":
            return self.seq_lens
        return tuple(
            local_keys(length, self.cp_world, self.cp_rank, self.cp_interleave)
            for length in self.seq_lens
        )

    def visible(self) -> tuple[tuple[int, ...], ...]:
        """local_visible_lens."""
        if self.visible_lens is not None:
            return self.visible_lens
        rng = np.random.default_rng(self.seed)
        return tuple(
            tuple(
                (0, length, int(rng.integers(length + 1)))[int(rng.integers(3))]
                for _ in range(self.seq_len_q)
            )
            for length in self.seq_lens
        )

    def plan(self, config: KernelConfig, multiprocessors: int) -> Plan:
        """The planner's answer; ValueError for what the configuration does not take."""
        return make_plan(
            config,
            self.held_lens(config.mask),
            num_heads=self.num_heads,
            seq_len_q=self.seq_len_q,
            multiprocessors=multiprocessors,
            window_left=self.mask(config.mask).window_left,
            splits=self.splits,
        )

    def as_dict(self, kind: str) -> dict[str, Any]:
        """JSON-ready description of the problem for a kernel of this mask."""
        masks: dict[str, dict[str, Any]] = {
            "window": {"window_left": self.window_left, "causal": self.causal},
            "dcp": {
                "cp_world": self.cp_world,
                "cp_rank": self.cp_rank,
                "cp_interleave": self.cp_interleave,
            },
            "visible": {"visible_lens": [list(row) for row in self.visible()]},
        }
        document = {
            "num_heads": self.num_heads,
            "seq_len_q": self.seq_len_q,
            "seq_lens": list(self.seq_lens),
            **masks.get(kind, {}),
            "splits": self.splits,
            "seed": self.seed,
            "values": self.values,
            **asdict(self.scalars),
        }
        if self.block_split_kvs is not None:
            document["block_split_kvs"] = list(self.block_split_kvs)
        return document

"""Device side of the masks: which keys a query token sees (host side: mlakern.masks).

All bounds are in key positions of the request on this device. The kind of mask is compiled in; its
numbers are run-time values.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from mlakern.config import KEY_TILE
from mlakern.kernels.arguments import Arguments
from mlakern.kernels.device import ceil_div, divmod_positive


@dataclass(frozen=True)
class Mask:
    """A kind of mask with a launch's arguments."""

    kind: str
    args: Arguments

    @property
    def has_begin(self) -> bool:
        """Whether keys at the front can be hidden too."""
        return self.kind == "window"

    def end(self, request: Int32, seq_len: Int32, token: Int32) -> Int32:
        """Exclusive upper bound of the keys that query token `token` sees; <= 0: none."""
        args = self.args
        if self.kind == "plain":
            return seq_len
        if self.kind == "causal":
            return _causal_end(args, seq_len, token)
        if self.kind == "window":
            causal = _causal_end(args, seq_len, token)
            return cutlass.select_(args.window_causal != 0, causal, seq_len)
        if self.kind == "dcp":
            global_len = (args.causal_seqs + request).load()
            return _local_keys(args, _causal_end(args, global_len, token))
        if self.kind == "visible":
            # Rows of padding lie past the last token.
            inside = cutlass.min(token, args.seq_len_q - 1)
            row = Int64(request) * args.seq_len_q + inside
            return (args.local_visible_lens + row).load()
        raise NotImplementedError(f"mask {self.kind!r}")

    def least_end(self, request: Int32, seq_len: Int32) -> Int32:
        """Smallest upper bound over the request's query tokens: tiles below it show all keys."""
        if self.kind == "visible":
            return _least_visible(self, request, seq_len)
        return self.end(request, seq_len, Int32(0))

    def begin(self, seq_len: Int32, token: Int32) -> Int32:
        """Inclusive lower bound of the keys that query token `token` sees."""
        if not self.has_begin:
            return Int32(0)
        args = self.args
        return cutlass.max(seq_len - args.seq_len_q - args.window_left + token, 0)

    def greatest_begin(self, seq_len: Int32) -> Int32:
        """Greatest lower bound over the request's query tokens."""
        return self.begin(seq_len, self.args.seq_len_q - 1) if self.has_begin else Int32(0)

    def key_tiles(self, seq_len: Int32) -> tuple[Int32, Int32]:
        """(first, number) of the key tiles that some token sees a key of."""
        first = Int32(0)
        if self.has_begin:
            first, _ = divmod_positive(self.begin(seq_len, Int32(0)), Int32(KEY_TILE))
        return first, ceil_div(seq_len, KEY_TILE) - first


def _causal_end(args: Arguments, length: Int32, token: Int32) -> Int32:
    return length - (args.seq_len_q - 1) + token


def _local_keys(args: Arguments, global_end: Int32) -> Int32:
    """How many of the first `global_end` keys of a request this rank holds."""
    stripe = args.cp_world * args.cp_interleave
    full, rest = divmod_positive(cutlass.max(global_end, 0), stripe)
    rest = rest - args.cp_rank * args.cp_interleave
    return full * args.cp_interleave + cutlass.max(cutlass.min(rest, args.cp_interleave), 0)


@cute.jit
def _least_visible(mask: Mask, request: Int32, seq_len: Int32) -> Int32:
    least = seq_len
    for token in cutlass.range(mask.args.seq_len_q, unroll=1):
        least = cutlass.min(least, mask.end(request, seq_len, token))
    return least

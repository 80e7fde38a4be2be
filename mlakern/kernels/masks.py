"""Device side of the masks: which keys a query token sees (host side: mlakern.masks).

All bounds are in key positions of the request. A mask is compiled in; its numbers are run-time
values.
"""

from __future__ import annotations

from cutlass import Int32

from mlakern.kernels.arguments import Arguments


def visible_end(mask: str, args: Arguments, seq_len: Int32, token: Int32) -> Int32:
    """Exclusive upper bound of the keys that query token `token` sees; <= 0: none."""
    if mask == "plain":
        return seq_len
    if mask == "causal":
        return seq_len - (args.seq_len_q - 1) + token
    raise NotImplementedError(f"mask {mask!r}")


def least_visible_end(mask: str, args: Arguments, seq_len: Int32) -> Int32:
    """Smallest bound over the request's query tokens: tiles below it need no mask."""
    return visible_end(mask, args, seq_len, Int32(0))

"""Which keys a query token sees, for every kind of mask: the rule once for the host.

All positions are local to the device: key k of a request is the k-th key this device holds. A
token sees the keys in [lower, upper); an upper bound <= lower means that it sees none.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlakern.config import KEY_TILE, MASKS
from mlakern.division import ceil_div
from mlakern.limits import MAX_SEQ_LEN


def local_keys(global_length: int, world: int, rank: int, interleave: int) -> int:
    """How many of the first `global_length` keys of a request lie on `rank`.

    Global key g belongs to rank (g // interleave) % world.
    """
    full, rest = divmod(max(global_length, 0), world * interleave)
    return full * interleave + min(max(rest - rank * interleave, 0), interleave)


def causal_upper(length: int, seq_len_q: int, token: int) -> int:
    """End of what query token `token` sees when the query tokens are the last keys of `length`."""
    return length - (seq_len_q - 1) + token


def window_lower(length: int, seq_len_q: int, token: int, window_left: int) -> int:
    """First key inside the window: the whole query block and `window_left` keys before it."""
    return max(0, length - seq_len_q - window_left + token)


@dataclass(frozen=True)
class Mask:
    """A mask and its run-time values.

    kind: one of mlakern.config.MASKS.
    window_left, causal: kind "window" only; keys of history, and whether the upper bound is causal.
    cp_world, cp_rank, cp_interleave: kind "dcp" only; how keys are spread over devices.

    Raises ValueError for a value that does not belong to the kind.
    """

    kind: str
    window_left: int = -1
    causal: bool = True
    cp_world: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1

    def __post_init__(self) -> None:
        if self.kind not in MASKS:
            raise ValueError(f"mask: got {self.kind!r}, need one of {', '.join(MASKS)}")
        if self.kind == "window" and not 0 <= self.window_left <= MAX_SEQ_LEN:
            raise ValueError(
                f"window_left: got {self.window_left}, need 0 to {MAX_SEQ_LEN} for mask window"
            )
        if self.kind != "window" and self.window_left != -1:
            raise ValueError(
                f"window_left: got {self.window_left} with mask {self.kind}; "
                "use mask window, or -1 for none"
            )
        if self.kind != "dcp" and (self.cp_world, self.cp_rank, self.cp_interleave) != (1, 0, 1):
            raise ValueError(f"cp_world: got {self.cp_world} with mask {self.kind}; use mask dcp")
        if self.cp_world < 1 or not 0 <= self.cp_rank < self.cp_world:
            raise ValueError(
                f"cp_rank: got {self.cp_rank} of cp_world {self.cp_world}, need 0 <= rank < world"
            )
        if self.cp_interleave < 1 or self.cp_world * self.cp_interleave > MAX_SEQ_LEN:
            raise ValueError(
                f"cp_interleave: got {self.cp_interleave} with cp_world {self.cp_world}, need >= 1 "
                f"and a product <= {MAX_SEQ_LEN}"
            )

    def check_tokens(self, seq_len_q: int) -> None:
        """ValueError for a window that does not hold the whole query block."""
        if self.kind == "window" and self.window_left < seq_len_q - 1:
            raise ValueError(
                f"window_left: got {self.window_left} with seq_len_q {seq_len_q}, "
                f"need >= {seq_len_q - 1}"
            )

    def key_tiles(self, keys: int, seq_len_q: int) -> range:
        """The key tiles that are computed: from the first that the window reaches to the last."""
        first = 0
        if self.kind == "window":
            first = window_lower(keys, seq_len_q, 0, self.window_left) // KEY_TILE
        return range(first, ceil_div(keys, KEY_TILE))

    def bounds(
        self,
        keys: int,
        seq_len_q: int,
        token: int,
        *,
        global_length: int | None = None,
        visible_len: int | None = None,
    ) -> tuple[int, int]:
        """(lower, upper) of the keys that query token `token` sees; upper is within [0, keys].

        keys: the request's seq_lens entry. global_length: its causal_seqs entry (dcp).
        visible_len: local_visible_lens of the token (visible).
        """
        lower = 0
        if self.kind == "causal":
            upper = causal_upper(keys, seq_len_q, token)
        elif self.kind == "window":
            self.check_tokens(seq_len_q)
            upper = causal_upper(keys, seq_len_q, token) if self.causal else keys
            lower = window_lower(keys, seq_len_q, token, self.window_left)
        elif self.kind == "dcp":
            if global_length is None:
                raise ValueError("causal_seqs: mask dcp needs each request's global length")
            end = causal_upper(global_length, seq_len_q, token)
            upper = local_keys(end, self.cp_world, self.cp_rank, self.cp_interleave)
        elif self.kind == "visible":
            if visible_len is None:
                raise ValueError("local_visible_lens: mask visible needs a length for each token")
            upper = visible_len
        else:
            upper = keys
        return lower, min(max(upper, 0), keys)

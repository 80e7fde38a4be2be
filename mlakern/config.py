"""A kernel configuration: what is compiled in, which combinations exist, and what each is called.

Everything that is not a field of :class:`KernelConfig` is a run-time value (heads, tokens, lengths,
splits, scales, LSE base): one cubin serves every value of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

LATENT_DIM = 512
ROPE_DIM = 64
HEAD_DIM = LATENT_DIM + ROPE_DIM
KEY_TILE = 128
MAX_HEADS = 128
MAX_SEQ_LEN_Q = 16
MAX_SPLITS = 256

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a", "sm_107a")
TILE_ROWS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128)
MASKS = ("plain", "causal", "window", "dcp", "visible")
SCHEDULES = ("grid", "persistent", "work_list")
PARTIAL_DTYPES = ("float32", "float16")
OUT_DTYPES = ("bfloat16", "float8_e4m3fn")

# The axes in the order of the canonical name. A value that is not listed does not exist.
AXES: Mapping[str, tuple[Any, ...]] = {
    "arch": ARCHITECTURES,
    "tile_m": TILE_ROWS,
    "page_size": PAGE_SIZES,
    "mask": MASKS,
    "pack_q": (False, True),
    "schedule": SCHEDULES,
    "partial_dtype": PARTIAL_DTYPES,
    "out_dtype": OUT_DTYPES,
}

_DTYPE_TOKENS = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
}


class ConfigError(ValueError):
    """A configuration that does not exist, with the reason."""


@dataclass(frozen=True, order=True)
class KernelConfig:
    """The compile-time axes of one cubin.

    Raises ConfigError for a value that is not on its axis or a combination without a kernel.
    """

    arch: str = "sm_100a"
    tile_m: int = 128
    page_size: int = 64
    mask: str = "causal"
    pack_q: bool = False
    schedule: str = "grid"
    partial_dtype: str = "float32"
    out_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for axis, allowed in AXES.items():
            value = getattr(self, axis)
            # bool is an int to Python: a tile of True or a pack_q of 1 must not pass.
            if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
                raise ConfigError(f"{axis}: got {value!r}, need one of {_listing(allowed)}")
        reason = unsupported_reason(self)
        if reason:
            raise ConfigError(f"{self.name}: {reason}")

    @property
    def name(self) -> str:
        """The canonical name: each axis in order, for instance mla_sm_100a_m128_p64_causal_…"""
        rows = "packed" if self.pack_q else "folded"
        return (
            f"mla_{self.arch.replace('_', '')}_m{self.tile_m}_p{self.page_size}_{self.mask}_{rows}"
            f"_{self.schedule.replace('_', '')}_{_DTYPE_TOKENS[self.partial_dtype]}"
            f"_{_DTYPE_TOKENS[self.out_dtype]}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def with_axes(self, **axes: Any) -> KernelConfig:
        return replace(self, **axes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KernelConfig:
        """The configuration with exactly these axes; an unknown or missing one is an error."""
        unknown = sorted(set(values) - set(AXES))
        missing = sorted(set(AXES) - set(values))
        if unknown or missing:
            raise ConfigError(
                f"configuration: unknown axes {unknown}, missing axes {missing}; "
                f"need exactly {_listing(AXES)}"
            )
        return cls(**values)

    @classmethod
    def from_name(cls, name: str) -> KernelConfig:
        """The configuration with this canonical name; ConfigError says which part is wrong."""
        return _parse_name(name)


def unsupported_reason(config: KernelConfig) -> str | None:
    """Why no kernel implements this combination, or None if one does."""
    for applies, reason in _RULES:
        if applies(config):
            return reason
    return None


_RULES: tuple[tuple[Callable[[KernelConfig], bool], str], ...] = (
    (
        lambda c: c.tile_m == 64 and c.arch in ("sm_103a", "sm_107a"),
        "tile_m 64 exists on sm_100a only; use tile_m 128",
    ),
    (
        lambda c: c.arch == "sm_90a",
        "no kernel for this architecture yet; available: sm_100a, sm_103a, sm_107a",
    ),
)


def _parse_name(name: str) -> KernelConfig:
    tokens = name.split("_")
    if len(tokens) != 9 or tokens[0] != "mla":
        raise ConfigError(
            f"configuration name {name!r}: got {len(tokens)} parts, need 9 like "
            f"{KernelConfig().name}; try `mlakern list`"
        )
    spellings: dict[str, dict[str, Any]] = {
        "arch": {a.replace("_", ""): a for a in ARCHITECTURES},
        "tile_m": {f"m{m}": m for m in TILE_ROWS},
        "page_size": {f"p{p}": p for p in PAGE_SIZES},
        "mask": {m: m for m in MASKS},
        "pack_q": {"folded": False, "packed": True},
        "schedule": {s.replace("_", ""): s for s in SCHEDULES},
        "partial_dtype": {_DTYPE_TOKENS[d]: d for d in PARTIAL_DTYPES},
        "out_dtype": {_DTYPE_TOKENS[d]: d for d in OUT_DTYPES},
    }
    values: dict[str, Any] = {}
    for token, (axis, allowed) in zip(tokens[1:], spellings.items(), strict=True):
        if token not in allowed:
            raise ConfigError(
                f"configuration name {name!r}: {axis} is {token!r}, need one of {_listing(allowed)}"
            )
        values[axis] = allowed[token]
    return KernelConfig(**values)


def _listing(values: Any) -> str:
    return ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)

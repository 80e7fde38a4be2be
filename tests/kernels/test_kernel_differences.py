"""Two configurations give code that differs where the configuration says so, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from mlakern.config import KernelConfig
from mlakern.store import Entry

Find = Callable[[KernelConfig], Entry]


def code_of(entry: Entry, role: str) -> str:
    """The PTX of one kernel, without its name."""
    name = entry.manifest.kernel(role).entry
    text = entry.load_ptx()
    start = text.index(f".entry {name}")
    following = re.search(r"\n\.visible|\Z", text[start:])
    assert following is not None
    return text[start : start + following.start()].replace(name, "kernel")


@pytest.mark.parametrize(
    ("one", "other", "combine_is_the_same"),
    [
        ({}, {"pack_q": True}, True),
        ({}, {"mask": "plain"}, True),
        (
            {"partial_dtype": "float16", "page_size": 16},
            {"partial_dtype": "float16", "page_size": 128, "pack_q": True},
            True,
        ),
        ({}, {"partial_dtype": "float16", "page_size": 16}, False),
        (
            {"partial_dtype": "float16", "page_size": 16},
            {"partial_dtype": "float16", "page_size": 128, "out_dtype": "float8_e4m3fn"},
            False,
        ),
    ],
)
def test_an_axis_changes_the_kernels_that_it_names(
    one: dict[str, Any], other: dict[str, Any], combine_is_the_same: bool, find_kernel: Find
) -> None:
    """How queries, pages and masks are read is the attention kernel's business alone."""
    first, second = find_kernel(KernelConfig(**one)), find_kernel(KernelConfig(**other))
    assert code_of(first, "attention") != code_of(second, "attention")
    assert (code_of(first, "combine") == code_of(second, "combine")) is combine_is_the_same
    for role in ("attention", "combine"):
        parameters = first.manifest.kernel(role).parameters
        assert parameters == second.manifest.kernel(role).parameters

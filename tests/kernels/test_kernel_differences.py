"""Two configurations give code that differs where the configuration says so, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from mlakern.config import KernelConfig
from mlakern.store import Entry

Find = Callable[[KernelConfig], Entry]

BASE = KernelConfig()


def code_of(entry: Entry, role: str) -> str:
    """The PTX of one kernel, without its name."""
    name = entry.manifest.kernel(role).entry
    text = entry.load_ptx()
    start = text.index(f".entry {name}")
    following = re.search(r"\n\.visible|\Z", text[start:])
    assert following is not None
    return text[start : start + following.start()].replace(name, "kernel")


@pytest.mark.parametrize(
    ("axes", "combine_is_the_same"),
    [
        ({"pack_q": True}, True),
        ({"page_size": 128}, True),
        ({"mask": "plain"}, True),
        ({"partial_dtype": "float16"}, False),
        ({"out_dtype": "float8_e4m3fn"}, False),
    ],
)
def test_an_axis_changes_the_kernels_that_it_names(
    axes: dict[str, object], combine_is_the_same: bool, find_kernel: Find
) -> None:
    """How queries, pages and masks are read is the attention kernel's business alone."""
    base, other = find_kernel(BASE), find_kernel(BASE.with_axes(**axes))
    assert code_of(base, "attention") != code_of(other, "attention")
    assert (code_of(base, "combine") == code_of(other, "combine")) is combine_is_the_same


def test_the_parameters_are_those_of_every_configuration(find_kernel: Find) -> None:
    base = find_kernel(BASE).manifest
    other = find_kernel(KernelConfig(page_size=128, pack_q=True, partial_dtype="float16")).manifest
    for role in ("attention", "combine"):
        assert base.kernel(role).parameters == other.kernel(role).parameters

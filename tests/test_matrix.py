from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlakern.config import AXES, KernelConfig
from mlakern.matrix import BuildItem, Matrix, MatrixError, load_matrix, parse_shard

REPOSITORY = Path(__file__).parents[1]


def read(tmp_path: Path, text: str) -> Matrix:
    file = tmp_path / "matrix.yaml"
    file.write_text(text)
    return load_matrix(file)


def configs(matrix: Matrix, name: str = "s") -> list[KernelConfig]:
    return [item.config for item in matrix.sets[name]]


class TestSets:
    def test_axes_give_every_combination_and_defaults_fill_the_rest(self, tmp_path: Path) -> None:
        matrix = read(
            tmp_path,
            """
            sets:
              s:
                axes: {page_size: [32, 64], mask: [plain, causal], pack_q: [true]}
            """,
        )
        assert set(configs(matrix)) == {
            KernelConfig(page_size=page, mask=mask, pack_q=True)
            for page, mask in itertools.product((32, 64), ("plain", "causal"))
        }

    def test_exclude_takes_values_or_lists_and_sees_defaults(self, tmp_path: Path) -> None:
        matrix = read(
            tmp_path,
            """
            sets:
              s:
                axes: {page_size: [16, 32, 64, 128], mask: [plain, causal]}
                exclude:
                  - {page_size: [16, 32], mask: plain}
                  - {page_size: 128, pack_q: false}
            """,
        )
        assert {(c.page_size, c.mask) for c in configs(matrix)} == {
            (16, "causal"),
            (32, "causal"),
            (64, "plain"),
            (64, "causal"),
        }

    def test_exclude_saves_a_combination_that_no_kernel_implements(self, tmp_path: Path) -> None:
        matrix = read(
            tmp_path,
            """
            sets:
              s:
                axes: {tile_m: [64, 128]}
                exclude: [{tile_m: 64}]
            """,
        )
        assert configs(matrix) == [KernelConfig()]

    def test_include_adds_and_duplicates_are_one(self, tmp_path: Path) -> None:
        matrix = read(
            tmp_path,
            """
            sets:
              s:
                axes: {page_size: [64, 64]}
                include: [{page_size: 64}, {page_size: 16}, {page_size: 16, mask: causal}]
            """,
        )
        assert configs(matrix) == [KernelConfig(page_size=16), KernelConfig(page_size=64)]

    def test_an_included_one_is_not_excluded(self, tmp_path: Path) -> None:
        matrix = read(
            tmp_path,
            """
            sets:
              s:
                axes: {page_size: [16, 64]}
                exclude: [{page_size: 16}]
                include: [{page_size: 16}]
            """,
        )
        assert [c.page_size for c in configs(matrix)] == [16, 64]

    def test_allow_spills_marks_what_it_matches(self, tmp_path: Path) -> None:
        matrix = read(
            tmp_path,
            """
            sets:
              s:
                axes: {page_size: [16, 64], mask: [plain, causal]}
                allow_spills: [{page_size: 16, mask: plain}]
            """,
        )
        assert [item.config for item in matrix.sets["s"] if item.allow_spills] == [
            KernelConfig(page_size=16, mask="plain")
        ]


@pytest.mark.parametrize(
    ("line", "message", "text"),
    [
        (1, "empty, need a mapping with the key sets", ""),
        (1, "matrix: got a list, need a mapping", "- a\n"),
        (1, "no key sets", "{}\n"),
        (2, "matrix: unknown key 'set', need one of sets", "sets: {}\nset: {}\n"),
        (
            3,
            "set s: unknown key 'axis', need one of axes, include, exclude, allow_spills",
            "sets:\n  s:\n    axis: {}\n",
        ),
        (2, "set s holds no configuration", "sets:\n  s: {}\n"),
        (2, "set s: got nothing, need a mapping", "sets:\n  s:\n"),
        (1, "sets: got none, need at least one", "sets: {}\n"),
        (2, "sets: got key a mapping, need a name", "sets:\n  {a: b}: {}\n"),
        (3, "set s: got key a list, need a name", "sets:\n  s:\n    [a]: 1\n"),
        (
            4,
            "pack_q: got 1, need one of false, true",
            "sets:\n s:\n  include:\n  - pack_q: 1\n",
        ),
        (
            1,
            "page_size: got '2024-99-99' tagged tag:yaml.org,2002:timestamp, need one of 16",
            "sets: {s: {include: [{page_size: 2024-99-99}]}}\n",
        ),
        (
            1,
            "page_size: got '64' tagged tag:yaml.org,2002:python/object:os.system, need one of 16",
            "sets: {s: {include: [{page_size: !!python/object:os.system 64}]}}\n",
        ),
        (
            1,
            "page_size: got a list, need one of 16",
            "sets: {s: {include: [{page_size: &a [*a]}]}}\n",
        ),
        (3, "not YAML: found character '\\t'", "sets:\n  s:\n\tinclude: []\n"),
        (2, "not YAML: character 1, special characters", "sets:\n  s: \x01\n"),
        (
            4,
            "axes: unknown key 'pagesize', need one of arch, tile_m, page_size",
            "sets:\n  s:\n    axes:\n      pagesize: [64]\n",
        ),
        (
            5,
            "page_size: got 48, need one of 16, 32, 64, 128",
            "sets:\n  s:\n    axes:\n      page_size:\n        - 48\n",
        ),
        (
            3,
            "pack_q: got 1, need one of false, true",
            "sets:\n  s:\n    include: [{pack_q: 1}]\n",
        ),
        (3, "page_size: got '64', need one of", 'sets:\n  s:\n    include: [{page_size: "64"}]\n'),
        (
            4,
            "page_size: got an empty one, need a list of values",
            "sets:\n  s:\n    axes:\n      page_size: []\n",
        ),
        (
            4,
            "page_size: got 64, need a list of values",
            "sets:\n  s:\n    axes:\n      page_size: 64\n",
        ),
        (
            5,
            "no kernel for this architecture yet; available: sm_100a, sm_103a, sm_107a; "
            "or exclude it",
            "sets:\n  s:\n    axes:\n      page_size: [64]\n      arch: [sm_100a, sm_90a]\n",
        ),
        (
            4,
            "tile_m 64 exists on sm_100a only; use tile_m 128",
            "sets:\n  s:\n    include:\n      - {tile_m: 64, arch: sm_103a}\n",
        ),
        (
            5,
            "exclude matches no combination that is left",
            "sets:\n  s:\n    axes: {page_size: [64]}\n    exclude:\n      - {page_size: 16}\n",
        ),
        (
            4,
            "exclude names no axis",
            "sets:\n  s:\n    axes: {page_size: [64]}\n    exclude: [{}]\n",
        ),
        (
            4,
            "exclude without axes has nothing to leave out",
            "sets:\n  s:\n    include: [{page_size: 64}]\n    exclude: [{page_size: 64}]\n",
        ),
        (
            4,
            "allow_spills matches no configuration of the set",
            "sets:\n  s:\n    include: [{page_size: 64}]\n    allow_spills: [{page_size: 16}]\n",
        ),
        (4, "sets: key 's' appears twice", "sets:\n  s:\n    include: [{}]\n  s: {}\n"),
        (3, "not YAML: ", "sets:\n  s: [\n"),
    ],
)
def test_an_error_names_file_and_line(tmp_path: Path, line: int, message: str, text: str) -> None:
    with pytest.raises(MatrixError) as caught:
        read(tmp_path, text)
    place, _, said = str(caught.value).partition(": ")
    assert place == f"{tmp_path}/matrix.yaml:{line}"
    assert message in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"sets: \xff", "not UTF-8: invalid start byte at byte 6"),
        (b"[" * 5000 + b"]" * 5000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_text_or_no_matrix_at_all(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "matrix.yaml"
    file.write_bytes(content)
    with pytest.raises(MatrixError) as caught:
        load_matrix(file)
    assert str(caught.value).startswith(f"{file}: {message}")


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "matrix.yaml"
    file.write_bytes(b"\xef\xbb\xbfsets: {s: {include: [{page_size: 32}]}}")
    assert configs(load_matrix(file)) == [KernelConfig(page_size=32)]


def test_repeated_values_do_not_multiply(tmp_path: Path) -> None:
    many = ", ".join(["64"] * 300)
    plain = ", ".join(["plain"] * 300)
    true = ", ".join(["true"] * 300)
    axes = f"{{page_size: [{many}], mask: [{plain}], pack_q: [{true}]}}"
    matrix = read(tmp_path, f"sets: {{s: {{axes: {axes}}}}}")
    assert configs(matrix) == [KernelConfig(page_size=64, mask="plain", pack_q=True)]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=r"none.yaml: cannot be read: No such file"):
        load_matrix(tmp_path / "none.yaml")


class TestSelection:
    text = """
sets:
  a: {axes: {page_size: [16, 32, 64]}}
  b: {axes: {page_size: [64, 128]}, allow_spills: [{page_size: 64}]}
"""

    def test_sets_merge_without_duplicates_and_keep_permissions(self, tmp_path: Path) -> None:
        items = read(tmp_path, self.text).select(["a", "b"])
        assert items == tuple(
            BuildItem(KernelConfig(page_size=size), allow_spills=size == 64)
            for size in (16, 32, 64, 128)
        )

    def test_architecture_filter(self, tmp_path: Path) -> None:
        matrix = read(tmp_path, self.text)
        assert len(matrix.select(["a"], ["sm_100a"])) == 3
        with pytest.raises(MatrixError, match="no configuration for sm_90a in a; need one of sm_1"):
            matrix.select(["a"], ["sm_90a"])
        with pytest.raises(MatrixError, match="got 'sm_100', need one of sm_90a, sm_100a"):
            matrix.select(["a"], ["sm_100"])

    def test_an_unknown_set_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(MatrixError, match="no set 'c', need one of a, b"):
            read(tmp_path, self.text).select(["c"])


SHIPPED = load_matrix(REPOSITORY / "build_matrix.yaml")


@given(count=st.integers(1, 80))
def test_shares_are_a_balanced_partition(count: int) -> None:
    shares = [SHIPPED.select(["release"], shard=f"{i}/{count}") for i in range(1, count + 1)]
    assert sorted(itertools.chain.from_iterable(shares)) == list(SHIPPED.sets["release"])
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("text", ["0/4", "5/4", "1/0", "1", "1/", "a/b", "-1/4", "1/4 "])
def test_a_share_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(MatrixError, match=r"need I/N with 1 <= I <= N"):
        parse_shard(text)


class TestShippedMatrix:
    def test_default_is_small_and_holds_every_value_that_exists(self) -> None:
        default = configs(SHIPPED, "default")
        assert len(default) <= 12
        for axis in AXES:
            values = {getattr(config, axis) for config in existing()}
            assert {getattr(config, axis) for config in default} == values

    def test_release_is_a_part_of_what_exists_that_builds_in_minutes(self) -> None:
        release = configs(SHIPPED, "release")
        assert set(release) < existing()
        # Two seconds of one core each: five minutes on two.
        assert len(release) <= 300

    def test_release_has_every_mask_with_usual_pages_in_both_main_schedules(self) -> None:
        release = set(configs(SHIPPED, "release"))
        usual = {
            config
            for config in existing()
            if config.page_size in (32, 64)
            and config.schedule in ("grid", "work_list")
            and not (config.tile_m == 64 and config.pack_q)
            and config.partial_dtype == "float32"
            and config.out_dtype == "bfloat16"
        }
        # Four tiles of architectures, the one of 64 rows not packed; 2 pages, 5 masks, 2 schedules.
        assert len(usual) == (3 * 2 + 1) * 2 * 5 * 2
        assert usual < release

    def test_every_value_is_released_with_the_causal_mask(self) -> None:
        causal = [c for c in configs(SHIPPED, "release") if c.mask == "causal"]
        for axis in set(AXES) - {"mask"}:
            values = {getattr(config, axis) for config in existing()}
            assert {getattr(config, axis) for config in causal} == values


@functools.cache
def existing() -> frozenset[KernelConfig]:
    """Every configuration that has a kernel."""
    found = set()
    for values in itertools.product(*AXES.values()):
        try:
            found.add(KernelConfig(*values))
        except ValueError:
            continue
    return frozenset(found)

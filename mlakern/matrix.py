"""The build matrix: a YAML file of named sets of configurations.

    sets:
      default:
        axes:                        # every combination; an axis left out has its default value
          page_size: [32, 64]
          mask: [plain, causal]
        exclude:                     # out of these combinations; a value or a list of values
          - {page_size: 32, mask: plain}
        include:                     # single configurations besides
          - {page_size: 128, pack_q: true}
        allow_spills:                # configurations whose registers may spill
          - {page_size: 128}

Everything is checked when the file is read, whichever set is built; an error names file and line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mlakern.config import ARCHITECTURES, AXES, ConfigError, KernelConfig

if TYPE_CHECKING:
    from yaml import Node

_SET_KEYS = ("axes", "include", "exclude", "allow_spills")


class MatrixError(ValueError):
    """A matrix file or a selection from it that is wrong; starts with file and line."""


@dataclass(frozen=True, order=True)
class BuildItem:
    """A configuration to build. allow_spills: a register spill does not fail it."""

    config: KernelConfig
    allow_spills: bool = False


@dataclass(frozen=True)
class Matrix:
    """The sets of one file; the items of each are sorted and different."""

    path: Path
    sets: Mapping[str, tuple[BuildItem, ...]]

    def select(
        self, names: Sequence[str], architectures: Sequence[str] = (), shard: str = "1/1"
    ) -> tuple[BuildItem, ...]:
        """The items of these sets, for these architectures (none: all), in this share.

        shard: "I/N" takes every N-th item from the I-th on, so shares differ by one at most.

        Raises MatrixError for a name that does not exist and for an architecture without an item.
        """
        for name in names:
            if name not in self.sets:
                known = ", ".join(self.sets)
                raise MatrixError(f"{self.path}: no set {name!r}, need one of {known}")
        merged: dict[KernelConfig, BuildItem] = {}
        for item in itertools.chain.from_iterable(self.sets[name] for name in names):
            # Allowed in one of the sets is allowed.
            if item.config not in merged or item.allow_spills:
                merged[item.config] = item
        items = sorted(merged.values())
        present = {item.config.arch for item in items}
        for arch in architectures:
            if arch not in ARCHITECTURES:
                known = ", ".join(ARCHITECTURES)
                raise MatrixError(f"architecture: got {arch!r}, need one of {known}")
            if arch not in present:
                raise MatrixError(
                    f"{self.path}: no configuration for {arch} in {', '.join(names)}; "
                    f"need one of {', '.join(sorted(present))}"
                )
        index, count = parse_shard(shard)
        chosen = [item for item in items if not architectures or item.config.arch in architectures]
        return tuple(chosen[index - 1 :: count])


def parse_shard(text: str) -> tuple[int, int]:
    """(I, N) of "I/N"; MatrixError unless 1 <= I <= N."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise MatrixError(f"shard: got {text!r}, need I/N with 1 <= I <= N, for instance 1/4")
    return int(match[1]), int(match[2])


def load_matrix(path: Path) -> Matrix:
    """The matrix in a file; MatrixError names the line of whatever is wrong with it."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise MatrixError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise MatrixError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise MatrixError(
            f"{path}:{line}: not YAML: character {error.character!r}, {error.reason}"
        ) from None
    except yaml.MarkedYAMLError as error:
        where = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise MatrixError(f"{path}{where}: not YAML: {error.problem}") from None
    except RecursionError:
        raise MatrixError(f"{path}: nested too deeply, need sets, axes and lists") from None
    if root is None:
        raise MatrixError(f"{path}:1: empty, need a mapping with the key sets")
    return _Reader(path).matrix(root)


class _Reader:
    """Turns YAML nodes, which know their lines, into a Matrix."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def matrix(self, root: Node) -> Matrix:
        top = self.mapping(root, "matrix", ("sets",))
        if "sets" not in top:
            self.fail(root, "no key sets")
        sets = self.mapping(top["sets"], "sets")
        if not sets:
            self.fail(top["sets"], "sets: got none, need at least one")
        return Matrix(self.path, {name: self.build_set(node, name) for name, node in sets.items()})

    def build_set(self, node: Node, name: str) -> tuple[BuildItem, ...]:
        parts = self.mapping(node, f"set {name}", _SET_KEYS)
        configs: set[KernelConfig] = set()
        if "axes" in parts:
            configs.update(self.product(parts["axes"], parts.get("exclude")))
        elif "exclude" in parts:
            self.fail(parts["exclude"], "exclude without axes has nothing to leave out")
        for entry in self.sequence(parts.get("include"), "include"):
            configs.add(self.included(entry))
        if not configs:
            self.fail(node, f"set {name} holds no configuration")
        spilling: set[KernelConfig] = set()
        for entry in self.sequence(parts.get("allow_spills"), "allow_spills"):
            rule = self.rule(entry, "allow_spills")
            matched = {config for config in configs if _matches(config.as_dict(), rule)}
            if not matched:
                self.fail(entry, "allow_spills matches no configuration of the set")
            spilling |= matched
        return tuple(sorted(BuildItem(config, config in spilling) for config in configs))

    def product(self, axes: Node, exclude: Node | None) -> Iterator[KernelConfig]:
        """The combinations of `axes` without the excluded ones."""
        nodes = self.mapping(axes, "axes", tuple(AXES))
        values = {
            # Each value once: a list of repeated ones must not multiply.
            axis: list(
                dict.fromkeys(
                    self.value(axis, item) for item in self.sequence(node, axis, empty=False)
                )
            )
            for axis, node in nodes.items()
        }
        rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
        defaults = _defaults()
        for entry in self.sequence(exclude, "exclude"):
            rule = self.rule(entry, "exclude")
            kept = [row for row in rows if not _matches({**defaults, **row}, rule)]
            if len(kept) == len(rows):
                self.fail(entry, "exclude matches no combination that is left")
            rows = kept
        for row in rows:
            try:
                yield KernelConfig(**row)
            except ConfigError as error:
                self.fail(self.culprit(axes, nodes, row), f"{error}; or exclude it")

    def culprit(self, axes: Node, nodes: Mapping[str, Node], row: Mapping[str, Any]) -> Node:
        """The value to blame for a combination without a kernel, if it is one value alone."""
        for axis, value in row.items():
            try:
                KernelConfig(**{axis: value})
            except ConfigError:
                items = self.sequence(nodes[axis], axis)
                return next(item for item in items if self.value(axis, item) == value)
        return axes

    def included(self, node: Node) -> KernelConfig:
        entries = self.mapping(node, "include", tuple(AXES))
        values = {axis: self.value(axis, item) for axis, item in entries.items()}
        try:
            return KernelConfig(**values)
        except ConfigError as error:
            return self.fail(node, str(error))

    def rule(self, node: Node, what: str) -> dict[str, list[Any]]:
        """Axis to the values that match; a single value may stand without a list."""
        entries = self.mapping(node, what, tuple(AXES))
        if not entries:
            self.fail(node, f"{what} names no axis, need one of {', '.join(AXES)}")
        return {
            axis: [
                self.value(axis, item)
                for item in (self.sequence(entry, axis) if _is_sequence(entry) else [entry])
            ]
            for axis, entry in entries.items()
        }

    def value(self, axis: str, node: Node) -> Any:
        allowed = AXES[axis]
        value = _scalar(node)
        if not any(type(value) is type(a) and value == a for a in allowed):
            known = ", ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in allowed)
            self.fail(node, f"{axis}: got {_shown(node)}, need one of {known}")
        return value

    def mapping(self, node: Node, what: str, keys: Sequence[str] | None = None) -> dict[str, Node]:
        from yaml import MappingNode

        if not isinstance(node, MappingNode):
            self.fail(node, f"{what}: got {_shown(node)}, need a mapping")
        result: dict[str, Node] = {}
        for key, value in node.value:
            name = _scalar(key)
            if not isinstance(name, str):
                self.fail(key, f"{what}: got key {_shown(key)}, need a name")
            if keys is not None and name not in keys:
                self.fail(key, f"{what}: unknown key {name!r}, need one of {', '.join(keys)}")
            if name in result:
                self.fail(key, f"{what}: key {name!r} appears twice")
            result[name] = value
        return result

    def sequence(self, node: Node | None, what: str, *, empty: bool = True) -> list[Node]:
        """The entries of a list that may be left out."""
        if node is None:
            return []
        if not _is_sequence(node) or not (empty or node.value):
            got = "an empty one" if _is_sequence(node) else _shown(node)
            self.fail(node, f"{what}: got {got}, need a list of values")
        return list(node.value)

    def fail(self, node: Node, message: str) -> NoReturn:
        raise MatrixError(f"{self.path}:{node.start_mark.line + 1}: {message}")


def _matches(values: Mapping[str, Any], rule: Mapping[str, list[Any]]) -> bool:
    return all(values[axis] in allowed for axis, allowed in rule.items())


def _scalar(node: Node) -> Any:
    """The value of a scalar; None for a list, a mapping and text that its tag does not take."""
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        return None
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError):
        return None


def _shown(node: Node) -> str:
    """A node in an error message: a scalar as it was read, of a list or a mapping the kind."""
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        return "a list" if _is_sequence(node) else "a mapping"
    if node.tag == "tag:yaml.org,2002:null":
        return "nothing"
    value = _scalar(node)
    return f"{node.value!r} tagged {node.tag}" if value is None else repr(value)


def _is_sequence(node: Node) -> bool:
    from yaml import SequenceNode

    return isinstance(node, SequenceNode)


def _defaults() -> dict[str, Any]:
    return KernelConfig().as_dict()

"""PTX text being read: the position, its line, literals, and errors that name the line."""

from __future__ import annotations

import re
import struct

from mlakern.emulator.errors import PtxError
from mlakern.emulator.program import FloatImm, Imm

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SPACE = re.compile(r"\s*")
_DIRECTIVE = re.compile(r"\.\w+")
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?$")
_LINE = re.compile(r"[^\n]*")
_IGNORED = (".file", ".loc", ".section", ".pragma", ".noreturn", ".alias")


class Text:
    """The text without its comments; ``position`` moves forward only."""

    def __init__(self, text: str) -> None:
        self.text = _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
        self.position = 0
        self.line = 1

    def error(self, message: str) -> PtxError:
        return PtxError(f"line {self.line}: {message}")

    def peek(self) -> str:
        """The next character that is not white space; "" at the end."""
        self.take(_SPACE, "space")
        return self.text[self.position : self.position + 1]

    def directive(self) -> str:
        """The directive that comes next, such as ".reg"; "." if there is none."""
        match = _DIRECTIVE.match(self.text, self.position)
        return match[0] if match else "."

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Read what the pattern describes, if it comes next."""
        match = pattern.match(self.text, self.position)
        if match is not None:
            self.line += match[0].count("\n")
            self.position = match.end()
        return match

    def take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """Read what the pattern describes; PtxError if something else comes."""
        match = self.match(pattern)
        if match is None:
            near = self.text[self.position : self.position + 60].split("\n")[0]
            raise self.error(f"expected {what}: got {near!r}")
        return match

    def skip(self, character: str) -> None:
        """Read one character that `peek` has shown."""
        assert self.text[self.position] == character
        self.position += 1

    def skip_debug_directive(self) -> bool:
        """Read a directive without meaning here, if one comes next."""
        name = self.directive()
        if name not in _IGNORED:
            return False
        line = self.take(_LINE, "a line")[0]
        if name == ".section" and "{" in line:
            self.take(re.compile(r"[^}]*\}"), "the end of the section")
        return True

    def literal(self, word: str) -> Imm | FloatImm:
        """A number: decimal, 0x…, 0b…, 0f… and 0d… (bits of floats), or 1.5."""
        if _INTEGER.match(word):
            return Imm(int(word) if word.isdigit() else int(word.rstrip("uU"), 0))
        if word[:2] in ("0f", "0F"):
            return FloatImm(struct.unpack(">f", bytes.fromhex(word[2:]))[0], 32)
        if word[:2] in ("0d", "0D"):
            return FloatImm(struct.unpack(">d", bytes.fromhex(word[2:]))[0], 64)
        try:
            return FloatImm(float(word), 64)
        except ValueError:
            raise self.error(f"literal not understood: {word!r}") from None

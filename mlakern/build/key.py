"""The key of a store entry: a digest of everything that decides its bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlakern.config import KernelConfig
from mlakern.manifest import SCHEMA as MANIFEST_SCHEMA

# Raised whenever what is digested, or how, changes.
KEY_SCHEMA = 1


@dataclass(frozen=True)
class BuildKey:
    """What goes into a key. sources: source_digest(); toolchain: tool to version."""

    config: KernelConfig
    sources: str
    options: Mapping[str, str]
    toolchain: Mapping[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 in hex."""
        document: dict[str, Any] = {
            "key_schema": KEY_SCHEMA,
            "manifest_schema": MANIFEST_SCHEMA,
            "config": self.config.as_dict(),
            "sources": self.sources,
            "options": dict(self.options),
            "toolchain": dict(self.toolchain),
        }
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from manifests import sample_manifest

from mlakern.config import KernelConfig
from mlakern.manifest import SCHEMA, ManifestError, SchemaError, loads


def document() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(sample_manifest().dumps())
    return parsed


def test_json_round_trip_gives_the_same_manifest_and_the_same_text() -> None:
    manifest = sample_manifest(KernelConfig(pack_q=True, page_size=16))
    text = manifest.dumps()
    assert loads(text) == manifest
    assert loads(text).dumps() == text


def test_text_is_sorted_and_ends_in_one_newline() -> None:
    text = sample_manifest().dumps()
    assert text.endswith("}\n")
    assert not text.endswith("\n\n")
    assert list(document()) == sorted(document())
    assert list(document()["kernels"][0]) == sorted(document()["kernels"][0])


def test_json_carries_the_launch_facts_at_fixed_places() -> None:
    doc = document()
    assert doc["schema"] == SCHEMA
    assert doc["name"] == "mla_sm100a_m128_p64_causal_folded_grid_f32_bf16"
    assert doc["config"]["page_size"] == 64
    attention = doc["kernels"][0]
    assert attention["role"] == "attention"
    # Four 128-byte tensor maps, then pointers: q_latent at 0, block_tables at 512, seq_lens at 520.
    by_name = {p["name"]: (p["kind"], p["offset"], p["size"]) for p in attention["parameters"]}
    assert by_name["c_rope"] == ("tensor_map", 384, 128)
    assert by_name["seq_lens"] == ("pointer", 520, 8)
    assert doc["limits"]["num_heads"] == [1, 128]


def test_a_mapping_does_not_depend_on_insertion_order() -> None:
    manifest = sample_manifest()
    provenance = manifest.provenance
    turned = dict(reversed(list(provenance.toolchain.items())))
    other = replace(manifest, provenance=replace(provenance, toolchain=turned))
    assert other.dumps() == manifest.dumps()


def test_kernel_by_role() -> None:
    manifest = sample_manifest()
    assert manifest.kernel("combine").entry == "mla_combine"
    with pytest.raises(KeyError, match="no kernel 'prefill', need one of attention, combine"):
        manifest.kernel("prefill")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=SCHEMA + 1), f"schema is {SCHEMA + 1}, need {SCHEMA}"),
        (lambda d: d.update(name="mla_other"), "name is 'mla_other'"),
        (lambda d: d.update(colour="red"), r"unknown fields \['colour'\]"),
        (lambda d: d.pop("cubin"), r"missing fields \['cubin'\]"),
        (
            lambda d: d["kernels"][1].update(block=[128, 1]),
            r"manifest.kernels\[1\].block: got 2 items, need 3",
        ),
        (
            lambda d: d["kernels"][0].update(registers=True),
            r"manifest.kernels\[0\].registers: got True, need int",
        ),
        (
            lambda d: d["config"].update(page_size=48),
            "manifest.config: page_size: got 48, need one of 16, 32, 64, 128",
        ),
        (
            lambda d: d["limits"].update(num_heads=["1", 128]),
            r"manifest.limits.num_heads\[0\]: got '1', need float",
        ),
    ],
)
def test_a_wrong_document_is_refused_with_its_path(change: Any, message: str) -> None:
    doc = document()
    change(doc)
    with pytest.raises(ManifestError, match=message):
        loads(json.dumps(doc), verify=False)


def test_a_damaged_document_is_not_believed() -> None:
    doc = document()
    doc["kernels"][0]["registers"] += 1
    with pytest.raises(ManifestError, match="its content gives another"):
        loads(json.dumps(doc))


def test_the_digest_is_of_the_text_without_it() -> None:
    doc = document()
    digest = doc.pop("digest")
    text = json.dumps(doc, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert digest == hashlib.sha256(text.encode()).hexdigest()


def test_another_schema_has_its_own_error() -> None:
    doc = document()
    doc["schema"] = SCHEMA + 1
    with pytest.raises(SchemaError):
        loads(json.dumps(doc))


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_text_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ManifestError, match="manifest: "):
        loads(text)

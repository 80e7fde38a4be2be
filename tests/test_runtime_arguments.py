"""Launch arguments: every byte where the signature says, and every refusal by name."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import sample_manifest

from mlakern.config import MASKS, SCHEDULES, KernelConfig
from mlakern.launch_rules import workspace_rule
from mlakern.manifest import Argument, Manifest
from mlakern.masks import Mask
from mlakern.planning import Plan, plan
from mlakern.runtime.arguments import Launch, Scalars, build_launches, pack
from mlakern.runtime.arrays import ArrayView
from mlakern.runtime.tensor_maps import map_rules, query_map, query_rows
from mlakern.runtime.tensors import Tensors
from mlakern.signature import Kind, signatures
from mlakern.tensormap import Swizzle, TensorMap

DEVICE = "cuda:0"


def manifest_of(config: KernelConfig) -> Manifest:
    return replace(
        sample_manifest(config), tensor_maps=map_rules(config), workspace=workspace_rule(config)
    )


def tensors_for(p: Plan, *, joined: bool = True, token_padding: int = 0) -> Tensors:
    heads, tokens, batch, page = p.num_heads, p.seq_len_q, p.batch, p.config.page_size
    width = 576 if joined else 512
    token = heads * width + token_padding
    q_latent = ArrayView(
        0x10000, (batch, tokens, heads, 512), (tokens * token, token, width, 1), "uint8", DEVICE
    )
    if joined:
        q_rope = replace(q_latent, address=0x10200, shape=(batch, tokens, heads, 64))
    else:
        token = heads * 64 + token_padding
        q_rope = ArrayView(
            0x900000, (batch, tokens, heads, 64), (tokens * token, token, 64, 1), "int8", DEVICE
        )
    pages = 5
    c_latent = ArrayView(
        0x2000000, (pages, page, 512), (page * 576 + 32, 576, 1), "float8_e4m3fn", DEVICE
    )
    return Tensors(
        q_latent=q_latent,
        q_rope=q_rope,
        c_latent=c_latent,
        c_rope=replace(c_latent, address=0x2000200, shape=(pages, page, 64)),
        block_tables=ArrayView(0x3000004, (batch, 9), (44, 4), "int32", DEVICE),
        seq_lens=ArrayView.dense(0x3100004, (batch,), "int32", DEVICE),
        out=ArrayView.dense(0x4000000, (batch, tokens, heads, 512), p.config.out_dtype, DEVICE),
        lse=ArrayView.dense(0x5000004, (batch, tokens, heads), "float32", DEVICE),
        workspace=ArrayView.dense(0x6000000, (p.workspace_size,), "uint8", DEVICE),
        **mask_arrays(p),
    )


def mask_arrays(p: Plan) -> dict[str, ArrayView]:
    """What the mask of the plan's kernel needs."""
    if p.config.mask == "dcp":
        return {"causal_seqs": ArrayView.dense(0x7000000, (p.batch,), "int32", DEVICE)}
    if p.config.mask == "visible":
        shape = (p.batch, p.seq_len_q)
        return {"local_visible_lens": ArrayView.dense(0x7100000, shape, "int32", DEVICE)}
    return {}


def make_plan(config: KernelConfig | None = None, **changes: Any) -> Plan:
    shape: dict[str, Any] = {"seq_lens": [130, 300], "num_heads": 16, "seq_len_q": 2, "splits": 3}
    return plan(config or KernelConfig(), **{**shape, "multiprocessors": 148, **changes})


SCALARS = Scalars(softmax_scale=0.25, output_scale=1.5, lse_base="e", rescale_threshold=4.0)


def launches(
    p: Plan, tensors: Tensors, scalars: Scalars = SCALARS, mask: Mask | None = None
) -> tuple[Launch, ...]:
    mask = mask or Mask(p.config.mask, window_left=p.window_left)
    return build_launches(manifest_of(p.config), p, tensors, scalars, mask, device=DEVICE)


def decoded(launch: Launch) -> dict[str, Any]:
    """Parameter values by name, read back as another language would: by kind."""
    formats = {"pointer": "<Q", "int32": "<i", "int64": "<q", "float32": "<f"}
    return {
        argument.name: value
        if isinstance(value, TensorMap)
        else struct.unpack(formats[argument.kind], value)[0]
        for argument, value in zip(launch.kernel.parameters, launch.parameters, strict=True)
    }


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_parameter_has_the_size_its_signature_says(mask: str, schedule: str) -> None:
    config = KernelConfig(mask=mask, schedule=schedule)
    window = 5 if mask == "window" else -1
    splits = None if schedule == "work_list" else 3
    p = make_plan(config, splits=splits, window_left=window)
    made = launches(p, tensors_for(p))
    planner = ["planner"] if schedule == "work_list" else []
    # 64 output rows leave multiprocessors idle: two CTAs for each.
    assert [launch.kernel.role for launch in made] == [*planner, "attention", "combine_bands2"]
    for launch in made:
        signature = signatures(config)[launch.kernel.role]
        sizes = [128 if isinstance(v, TensorMap) else len(v) for v in launch.parameters]
        assert sizes == [parameter.kind.size for parameter in signature]
        assert [isinstance(v, TensorMap) for v in launch.parameters] == [
            parameter.kind is Kind.TENSOR_MAP for parameter in signature
        ]


def test_values_by_hand() -> None:
    p = make_plan()
    attention, combine = launches(p, tensors_for(p))
    assert (attention.entry, attention.grid, attention.block, attention.cluster) == (
        "mla_attention",
        (2, 3, 2),
        (384, 1, 1),
        (2, 1, 1),
    )
    assert (combine.entry, combine.grid) == ("mla_combine_bands2", (2 * 16, 2, 2))
    lse_offset = 2 * 2 * 16 * 3 * 512 * 4
    expected = {
        "block_tables": 0x3000004,
        "seq_lens": 0x3100004,
        "out": 0x4000000,
        "lse": 0x5000004,
        "partial_out": 0x6000000,
        "partial_lse": 0x6000000 + lse_offset,
        "batch": 2,
        "num_heads": 16,
        "seq_len_q": 2,
        "query_tiles": 1,
        "tile_rows": 32,
        "splits": 3,
        "block_split_kvs": 0,
        "q_row_extent": 32,
        "q_box_rows": 64,
        "block_table_stride": 11,
        "out_stride_batch": 2 * 16 * 512,
        "out_stride_token": 16 * 512,
        "out_stride_head": 512,
        "output_scale": 1.5,
        "lse_factor": np.float32(math.log(2)),
        "softmax_scale_log2": np.float32(0.25 / math.log(2)),
        "rescale_threshold": 4.0,
        "p_prescale_log2": 0.0,
    }
    got = decoded(attention)
    assert {name: got[name] for name in expected} == expected
    shared = {name: value for name, value in expected.items() if name in decoded(combine)}
    assert decoded(combine) == shared


def test_many_rows_are_combined_by_one_cta_each() -> None:
    # 2 * 64 * 2 rows on 148 multiprocessors.
    combine = launches(p := make_plan(num_heads=64), tensors_for(p))[1]
    assert (combine.entry, combine.grid) == ("mla_combine", (2 * 64, 2, 1))


def dense(address: int, *shape: int, dtype: str = "int32") -> ArrayView:
    return ArrayView.dense(address, shape, dtype, DEVICE)


def test_masks_by_hand() -> None:
    config = KernelConfig(mask="window")
    p = make_plan(config, window_left=77)
    for causal in (True, False):
        mask = Mask("window", window_left=77, causal=causal)
        for launch in launches(p, tensors_for(p), mask=mask):
            got = decoded(launch)
            assert got["window_left"] == 77
            assert got["window_causal"] == int(causal)
    p = make_plan(KernelConfig(mask="dcp"))
    mask = Mask("dcp", cp_world=8, cp_rank=5, cp_interleave=16)
    got = decoded(launches(p, tensors_for(p), mask=mask)[0])
    names = ("causal_seqs", "cp_world", "cp_rank", "cp_interleave")
    assert [got[name] for name in names] == [0x7000000, 8, 5, 16]
    p = make_plan(KernelConfig(mask="visible"))
    assert decoded(launches(p, tensors_for(p))[0])["local_visible_lens"] == 0x7100000


def test_splits_of_each_request_reach_both_kernels() -> None:
    p = make_plan(KernelConfig(schedule="persistent"))
    tensors = replace(tensors_for(p), block_split_kvs=dense(0x8000004, 2))
    made = launches(p, tensors)
    assert [decoded(launch)["block_split_kvs"] for launch in made] == [0x8000004] * 2
    # Six items for 74 clusters.
    assert [launch.grid for launch in made] == [(12, 1, 1), (32, 2, 2)]


def test_a_work_list_is_planned_on_the_device_or_given() -> None:
    p = make_plan(KernelConfig(schedule="work_list"), splits=None, multiprocessors=10)
    tensors = tensors_for(p)
    # Five clusters: 8 slots of 32 rows, the list behind them.
    at = 0x6000000 + p.workspace.work_list_offset
    assert p.workspace.work_list_offset == 8 * 32 * 512 * 4 + 8 * 32 * 4
    made = launches(p, tensors)
    assert [launch.kernel.role for launch in made] == ["planner", "attention", "combine"]
    assert [decoded(launch)["work_list"] for launch in made] == [at] * 3
    assert [decoded(launch)["clusters"] for launch in made] == [5] * 3
    assert [launch.grid for launch in made] == [(1, 1, 1), (10, 1, 1), (32, 2, 1)]
    # 6 + 2 + 2 words up to 16, then 8 for each of up to 2 + 4 items.
    assert p.work_list_words == 16 + 8 * 6
    given = launches(p, replace(tensors, work_list=dense(0x9000000, 64)))
    assert [launch.kernel.role for launch in given] == ["attention", "combine"]
    assert [decoded(launch)["work_list"] for launch in given] == [0x9000000] * 2


def test_one_cluster_divides_nothing() -> None:
    p = make_plan(KernelConfig(schedule="work_list"), splits=None, multiprocessors=1)
    planner, attention = launches(p, tensors_for(p))
    assert (planner.grid, attention.grid) == ((1, 1, 1), (2, 1, 1))
    assert decoded(attention)["partial_out"] == 0
    assert decoded(attention)["work_list"] == 0x6000000


def test_one_split_passes_no_workspace_and_launches_once() -> None:
    p = make_plan(splits=1)
    (attention,) = launches(p, replace(tensors_for(p), workspace=None, lse=None))
    got = decoded(attention)
    assert (got["partial_out"], got["partial_lse"], got["lse"], got["splits"]) == (0, 0, 0, 1)


def test_pdl_is_a_launch_choice() -> None:
    p = make_plan()
    mask = Mask("causal")
    made = build_launches(
        manifest_of(p.config), p, tensors_for(p), SCALARS, mask, device=DEVICE, pdl=True
    )
    assert [launch.pdl for launch in made] == [True, True]
    assert [launch.pdl for launch in launches(p, tensors_for(p))] == [False, False]


def test_strides_beyond_32_bits() -> None:
    p = make_plan()
    tensors = tensors_for(p)
    page_stride, token = (1 << 33) + 16, (1 << 32) * 2 + 32
    tensors = replace(
        tensors,
        c_latent=replace(tensors.c_latent, strides=(page_stride, 576, 1)),
        c_rope=replace(tensors.c_rope, strides=(page_stride, 576, 1)),
        out=replace(tensors.out, strides=(2 * token, token, 1024, 2)),
    )
    got = decoded(launches(p, tensors)[0])
    assert got["c_latent"].strides == (576, page_stride)
    assert (got["out_stride_batch"], got["out_stride_token"]) == (token, token // 2)


@settings(max_examples=150)
@given(
    heads=st.integers(1, 128),
    tokens=st.integers(1, 8),
    batch=st.integers(1, 3),
    packed=st.booleans(),
    joined=st.booleans(),
    padding=st.sampled_from([0, 16, 576]),
)
def test_a_box_row_is_the_query_row_that_the_kernel_expects(
    heads: int, tokens: int, batch: int, packed: bool, joined: bool, padding: int
) -> None:
    config = KernelConfig(pack_q=packed)
    padding = 0 if packed else padding
    p = plan(
        config,
        batch=batch,
        max_seq_len=5,
        num_heads=heads,
        seq_len_q=tokens,
        multiprocessors=148,
        fold=1 if padding and heads % 2 else None,
    )
    tensors = tensors_for(p, joined=joined, token_padding=padding)
    view = tensors.q_latent
    rows = query_rows(p, {"q_latent": view, "q_rope": tensors.q_rope})
    tensor_map = query_map("q_latent", view, rows)
    assert 64 % rows.box_rows == 0
    for b, tile, row in itertools.product(range(batch), range(p.query_tiles), range(128)):
        if packed:
            # Tiles are cut from one list of rows: the kernel adds tile * 128 to the row.
            token, head = divmod(tile * 128 + row, heads)
            coordinates = (row + tile * 128, 0, b)
            inside = token < tokens
        else:
            fold_token, head = divmod(row, heads)
            token = tile * p.fold + fold_token
            coordinates = (row, tile, b)
            inside = fold_token < p.fold
        at = box_address(tensor_map, rows.row_extent, coordinates)
        if inside:
            s = view.strides
            assert at == view.address + b * s[0] + token * s[1] + head * s[2]
        else:
            assert at is None
    # A box never crosses from one row dimension into the next.
    assert tensor_map.extents[2] == 1 or rows.row_extent % rows.box_rows == 0
    # TMA writes to multiples of 128 bytes: two rope rows of 64.
    assert rows.box_rows % 2 == 0


def box_address(
    tensor_map: TensorMap, row_extent: int, coordinates: tuple[int, int, int]
) -> int | None:
    """Address of column 0 of (row, tile, request), None outside: the kernel's rule, by hand."""
    row, tile, request = coordinates
    if tensor_map.extents[2] == 1:
        position = (0, row, 0, tile, request)
    else:
        position = (0, row % row_extent, row // row_extent, tile, request)
    if any(p >= e for p, e in zip(position, tensor_map.extents, strict=True)):
        return None
    return tensor_map.address + sum(
        p * s for p, s in zip(position[1:], tensor_map.strides, strict=True)
    )


@settings(max_examples=60)
@given(
    heads=st.integers(1, 128),
    tokens=st.integers(1, 8),
    packed=st.booleans(),
    page_size=st.sampled_from([16, 32, 64, 128]),
    padding=st.sampled_from([0, 48]),
)
def test_map_rules_of_the_manifest_give_the_maps(
    heads: int, tokens: int, packed: bool, page_size: int, padding: int
) -> None:
    config = KernelConfig(pack_q=packed, page_size=page_size)
    padding = 0 if packed else padding
    fold = 1 if padding and heads % 2 else None
    p = make_plan(config, seq_lens=[130, 9], num_heads=heads, seq_len_q=tokens, fold=fold)
    tensors = tensors_for(p, token_padding=padding)
    got = decoded(launches(p, tensors)[0])
    q, c = tensors.q_latent.strides, tensors.c_latent.strides
    names: Mapping[str, int] = {
        "batch": p.batch,
        "seq_len_q": tokens,
        "num_heads": heads,
        "fold": p.fold,
        "q_row_extent": got["q_row_extent"],
        "q_box_rows": got["q_box_rows"],
        "pages": 5,
        "batch_stride": q[0],
        "token_stride": q[1],
        "row_stride": q[2] if heads > 1 else q[1],
        "page_stride": c[0],
        "key_stride": c[1],
    }
    for rule in map_rules(config):
        made = got[rule.parameter]

        def values(expressions: tuple[str, ...]) -> tuple[int, ...]:
            return tuple(eval(expression, {}, names) for expression in expressions)

        assert values(rule.extents) == made.extents
        assert values(rule.box) == made.box
        assert rule.swizzle == made.swizzle.value
        # The stride of a dimension of one element is never used.
        used = [
            (rule_stride, stride)
            for rule_stride, stride, extent in zip(
                values(rule.strides), made.strides, made.extents[1:], strict=True
            )
            if extent > 1
        ]
        assert all(rule_stride == stride for rule_stride, stride in used)
    assert [rule.parameter for rule in map_rules(config)] == [
        q.name for q in signatures(config)["attention"] if q.kind is Kind.TENSOR_MAP
    ]


def test_cache_maps_by_hand() -> None:
    p = make_plan(KernelConfig(page_size=128))
    got = decoded(launches(p, tensors_for(p))[0])
    assert got["c_latent"] == TensorMap(
        0x2000000, 1, (512, 128, 5), (576, 128 * 576 + 32), (128, 64, 1), Swizzle.B128
    )
    assert got["c_rope"] == TensorMap(
        0x2000200, 1, (64, 128, 5), (576, 128 * 576 + 32), (64, 64, 1), Swizzle.B64
    )
    small = make_plan(KernelConfig(page_size=16))
    assert decoded(
        launches(
            small,
            replace(
                tensors_for(small),
                block_tables=ArrayView(0x3000004, (2, 19), (80, 4), "int32", DEVICE),
            ),
        )[0]
    )["c_latent"].box == (128, 16, 1)


def changed(name: str, **changes: Any) -> Any:
    def change(tensors: Tensors) -> Tensors:
        return replace(tensors, **{name: replace(getattr(tensors, name), **changes)})

    return change


REFUSALS = [
    (changed("q_latent", dtype="bfloat16"), "q_latent: got dtype bfloat16, need float8_e4m3fn or"),
    (changed("q_latent", shape=(2, 2, 15, 512)), "q_latent: got shape [2, 2, 15, 512], need [2, 2"),
    (changed("q_latent", device="cpu"), "q_latent: got device cpu, need cuda:0"),
    (changed("q_latent", device="cuda:1"), "q_latent: got device cuda:1, need cuda:0"),
    (changed("q_latent", address=0x10008), "q_latent: got address 0x10008, need a multiple of 16"),
    (
        changed("q_rope", shape=(2, 2, 16, 32)),
        "q_rope: got shape [2, 2, 16, 32], need [2, 2, 16, 64",
    ),
    (
        changed("q_latent", strides=(18432, 9216, 577, 1)),
        "q_latent: got a stride of 577 bytes in dimension 2, need a positive multiple of 16",
    ),
    (
        changed("q_latent", strides=(18432, 9216, 576, 2)),
        "q_latent: got 2 bytes between columns, need contiguous rows",
    ),
    (changed("c_latent", shape=(0, 64, 512)), "c_latent: got shape [0, 64, 512], need >= 1 page"),
    (
        changed("c_latent", shape=(5, 32, 512)),
        "c_latent: got shape [5, 32, 512], need [5, 64, 512]",
    ),
    (changed("c_latent", strides=(36864, 580, 1)), "c_latent: got a stride of 580 bytes"),
    (changed("c_rope", shape=(4, 64, 64)), "c_rope: got shape [4, 64, 64], need [5, 64, 64]"),
    (changed("c_rope", dtype="float16"), "c_rope: got dtype float16"),
    (changed("block_tables", dtype="int64"), "block_tables: got dtype int64, need int32"),
    (
        changed("block_tables", shape=(4, 9)),
        "block_tables: got shape [4, 9], need [2, >= 5]: one row for each request (not for each to",
    ),
    (changed("block_tables", shape=(2, 4)), "block_tables: got shape [2, 4], need [2, >= 5]"),
    (changed("block_tables", strides=(44, 8)), "block_tables: got 8 bytes between entries"),
    (changed("block_tables", strides=(46, 4)), "block_tables: got a row stride of 46 bytes"),
    (
        changed("block_tables", address=0x3000006),
        "block_tables: got address 0x3000006, need a mult",
    ),
    (changed("block_tables", device="cpu"), "block_tables: got device cpu"),
    (changed("seq_lens", dtype="int64"), "seq_lens: got dtype int64, need int32"),
    (changed("seq_lens", shape=(3,)), "seq_lens: got shape [3], need [2]"),
    (changed("seq_lens", strides=(8,)), "seq_lens: got strides of [8] bytes for shape [2], need a"),
    (changed("out", dtype="float16"), "out: got dtype float16, need bfloat16"),
    (changed("out", shape=(2, 2, 16, 576)), "out: got shape [2, 2, 16, 576], need [2, 2, 16, 512]"),
    (changed("out", strides=(32768, 16384, 1032, 2)), "out: got a stride of 1032 bytes in dimensi"),
    (changed("out", address=0x4000004), "out: got address 0x4000004, need a multiple of 16"),
    (changed("lse", dtype="bfloat16"), "lse: got dtype bfloat16, need float32"),
    (changed("lse", shape=(64,)), "lse: got shape [64], need [2, 2, 16]"),
    (
        changed("lse", strides=(64, 128, 4)),
        "lse: got strides of [64, 128, 4] bytes for shape [2, 2,",
    ),
    (
        lambda t: replace(t, workspace=None),
        "workspace: got none, need 393984 bytes: 6 partial results and 0 words of a work list",
    ),
    (
        lambda t: replace(t, causal_seqs=dense(64, 2)),
        "causal_seqs: got an array with a kernel of mask causal, need dcp",
    ),
    (
        lambda t: replace(t, local_visible_lens=dense(64, 2, 2)),
        "local_visible_lens: got an array with a kernel of mask causal, need visible",
    ),
    (
        lambda t: replace(t, work_list=dense(64, 2)),
        "work_list: got an array with a kernel of schedule grid, need work_list",
    ),
    (
        lambda t: replace(t, block_split_kvs=dense(64, 3)),
        "block_split_kvs: got shape [3], need [2]",
    ),
    (
        lambda t: replace(t, block_split_kvs=dense(64, 2, dtype="int64")),
        "block_split_kvs: got dtype int64, need int32",
    ),
    (changed("workspace", shape=(393983,)), "workspace: got 393983 bytes, need 393984"),
    (
        changed("workspace", dtype="float32"),
        "workspace: got float32 of shape [393984], need one dim",
    ),
    (changed("workspace", shape=(2, 196992), strides=(196992, 1)), "workspace: got uint8 of shape"),
    (
        changed("workspace", address=0x6000080),
        "workspace: got address 0x6000080, need a multiple of",
    ),
    (changed("workspace", device="cpu"), "workspace: got device cpu"),
]


@pytest.mark.parametrize(
    ("change", "message"), REFUSALS, ids=[m.split(",")[0] for _, m in REFUSALS]
)
def test_refused_tensors(change: Any, message: str) -> None:
    p = make_plan()
    with pytest.raises(ValueError) as error:
        launches(p, change(tensors_for(p)))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("mask", "tensor", "view", "message"),
    [
        ("dcp", "causal_seqs", None, "causal_seqs: got none, need [2] int32 for mask dcp"),
        ("dcp", "causal_seqs", dense(64, 2, 2), "causal_seqs: got shape [2, 2], need [2]"),
        ("dcp", "causal_seqs", dense(66, 2), "causal_seqs: got address 0x42, need a multiple of 4"),
        ("visible", "local_visible_lens", None, "local_visible_lens: got none, need [2, 2] int32"),
        (
            "visible",
            "local_visible_lens",
            dense(64, 2),
            "local_visible_lens: got shape [2], need [2, 2]",
        ),
        (
            "visible",
            "local_visible_lens",
            ArrayView(64, (2, 2), (16, 4), "int32", DEVICE),
            "local_visible_lens: got strides of [16, 4] bytes",
        ),
    ],
)
def test_refused_arrays_of_masks(
    mask: str, tensor: str, view: ArrayView | None, message: str
) -> None:
    p = make_plan(KernelConfig(mask=mask))
    with pytest.raises(ValueError) as error:
        launches(p, replace(tensors_for(p), **{tensor: view}))
    assert str(error.value).startswith(message)


def test_a_work_list_is_as_long_as_the_plan_says_and_excludes_splits() -> None:
    p = make_plan(KernelConfig(schedule="work_list"), splits=None, multiprocessors=10)
    with pytest.raises(ValueError, match=r"^work_list: got shape \[63\], need \[64\]"):
        launches(p, replace(tensors_for(p), work_list=dense(64, 63)))
    with pytest.raises(ValueError, match=r"^block_split_kvs: got an array .* schedule work_list, "):
        launches(p, replace(tensors_for(p), block_split_kvs=dense(64, 2)))
    short = ArrayView.dense(0x6000000, (p.workspace_size - 1,), "uint8", DEVICE)
    with pytest.raises(ValueError, match=rf"^workspace: got .* need {p.workspace_size}"):
        launches(p, replace(tensors_for(p), workspace=short))


def test_a_mask_of_another_kernel_or_window_is_refused() -> None:
    p = make_plan()
    with pytest.raises(ValueError, match=r"^mask: got plain, need causal, the kernel's"):
        launches(p, tensors_for(p), mask=Mask("plain"))
    p = make_plan(KernelConfig(mask="window"), window_left=9)
    with pytest.raises(ValueError, match=r"^window_left: got 8, need 9, the plan's; try plan\("):
        launches(p, tensors_for(p), mask=Mask("window", window_left=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softmax_scale": 0.0}, "softmax_scale: got 0.0, need a finite number > 0"),
        ({"softmax_scale": math.nan}, "softmax_scale: got nan"),
        ({"output_scale": -1.0}, "output_scale: got -1.0"),
        ({"output_scale": math.inf}, "output_scale: got inf"),
        ({"lse_base": "10"}, 'lse_base: got \'10\', need "2" or "e"'),
        ({"rescale_threshold": -1.0}, "rescale_threshold: got -1.0, need a finite number >= 0"),
        ({"p_prescale_log2": math.nan}, "p_prescale_log2: got nan, need a finite number >= 0"),
        (
            {"rescale_threshold": 8.0, "p_prescale_log2": 0.9},
            "rescale_threshold: got 8.0 + p_prescale_log2 0.9, need a sum <= log2(448) = 8.8074",
        ),
    ],
)
def test_refused_scalars(changes: dict[str, Any], message: str) -> None:
    p = make_plan()
    with pytest.raises(ValueError) as error:
        launches(p, tensors_for(p), replace(SCALARS, **changes))
    assert str(error.value).startswith(message)


def test_one_scattered_query_tensor_scatters_both() -> None:
    p = make_plan()
    tensors = tensors_for(p, joined=False)
    padded = replace(tensors.q_rope, strides=(4096, 2048, 64, 1))
    got = decoded(launches(p, replace(tensors, q_rope=padded))[0])
    assert (got["q_row_extent"], got["q_box_rows"]) == (16, 16)
    assert got["q_latent"].extents == (512, 16, 2, 1, 2)
    assert got["q_latent"].strides == (512, 8192, 16, 16384)
    assert got["q_rope"].strides == (64, 2048, 16, 4096)


def test_a_plan_of_another_kernel_is_refused() -> None:
    p = make_plan(KernelConfig(mask="plain"))
    with pytest.raises(ValueError, match=r"^plan: got one for mla_sm100a_m128_p64_plain"):
        build_launches(
            manifest_of(KernelConfig()), p, tensors_for(p), SCALARS, Mask("plain"), device=DEVICE
        )


def test_packed_rows_refuse_padded_tokens() -> None:
    p = make_plan(KernelConfig(pack_q=True))
    with pytest.raises(ValueError, match=r"^q_latent: .*token stride = 16 \* head stride"):
        launches(p, tensors_for(p, token_padding=16))


def test_scattered_tokens_need_an_even_number_of_heads_or_tiles_of_one_token() -> None:
    p = make_plan(num_heads=3)
    with pytest.raises(ValueError, match=r"^q_latent: got an odd number of heads, 3, .*fold=1"):
        launches(p, tensors_for(p, token_padding=16))
    single = make_plan(num_heads=3, fold=1)
    got = decoded(launches(single, tensors_for(single, token_padding=16))[0])
    assert (got["tile_rows"], got["q_row_extent"], got["q_box_rows"]) == (3, 3, 64)


def test_the_cuda_array_interface_names_no_device() -> None:
    p = make_plan()
    tensors = changed("out", device="cuda")(tensors_for(p))
    assert launches(p, tensors) == launches(p, tensors_for(p))


def test_a_parameter_that_this_runtime_does_not_know() -> None:
    kernel = manifest_of(KernelConfig()).kernels[1]
    odd = replace(kernel, parameters=(Argument("sinks", "pointer", 0, 8, ""),))
    with pytest.raises(ValueError, match="parameter sinks of kind pointer is unknown"):
        pack(odd, {"out": 1})
    wrong_kind = replace(kernel, parameters=(Argument("out", "tensor_map", 0, 128, ""),))
    with pytest.raises(ValueError, match="parameter out of kind tensor_map is unknown"):
        pack(wrong_kind, {"out": 1})

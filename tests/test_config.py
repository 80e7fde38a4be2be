from __future__ import annotations

import itertools
from typing import Any

import pytest

from mlakern.config import AXES, ConfigError, KernelConfig, unsupported_reason


def existing() -> list[KernelConfig]:
    found = []
    for values in itertools.product(*AXES.values()):
        try:
            found.append(KernelConfig(*values))
        except ConfigError:
            continue
    return found


def test_names_are_different_and_lead_back() -> None:
    configs = existing()
    # 480 of each architecture; sm_100a has them with tiles of 64 rows as well.
    assert len({config.name for config in configs}) == len(configs) == 1920
    for config in configs:
        assert KernelConfig.from_name(config.name) == config
        assert KernelConfig.from_dict(config.as_dict()) == config


def test_canonical_name() -> None:
    config = KernelConfig(
        page_size=16, mask="plain", pack_q=True, partial_dtype="float16", out_dtype="float8_e4m3fn"
    )
    assert config.name == "mla_sm100a_m128_p16_plain_packed_grid_f16_e4m3"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"page_size": 48}, "page_size: got 48, need one of 16, 32, 64, 128"),
        ({"page_size": 64.0}, "page_size: got 64.0"),
        ({"tile_m": True}, "tile_m: got True, need one of 64, 128"),
        ({"pack_q": 1}, "pack_q: got 1, need one of false, true"),
        ({"arch": "sm_100"}, "arch: got 'sm_100', need one of sm_90a, sm_100a, sm_103a, sm_107a"),
        ({"arch": "sm_103a", "tile_m": 64}, "tile_m 64 exists on sm_100a only"),
        ({"arch": "sm_90a"}, "no kernel for this architecture yet; available: sm_100a"),
    ],
)
def test_what_does_not_exist_is_refused_with_its_reason(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KernelConfig(**axes)
    assert message in str(caught.value)


def test_the_default_exists() -> None:
    assert unsupported_reason(KernelConfig()) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mla_sm100a", "got 2 parts, need 9 like mla_sm100a_m128_p64_causal_folded_grid_f32_bf16"),
        ("fmha_sm100a_m128_p64_causal_folded_grid_f32_bf16", "need 9 like"),
        ("mla_sm100_m128_p64_causal_folded_grid_f32_bf16", "arch is 'sm100', need one of sm90a"),
        ("mla_sm100a_m128_p48_causal_folded_grid_f32_bf16", "page_size is 'p48', need one of p16"),
        ("mla_sm90a_m128_p64_dcp_folded_grid_f32_bf16", "no kernel for this architecture yet"),
    ],
)
def test_a_wrong_name_is_refused_with_the_part_that_is_wrong(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KernelConfig.from_name(name)
    assert message in str(caught.value)


def test_a_dictionary_needs_exactly_the_axes() -> None:
    values = KernelConfig().as_dict()
    del values["mask"]
    values["masks"] = "plain"
    with pytest.raises(ConfigError, match=r"unknown axes \['masks'\], missing axes \['mask'\]"):
        KernelConfig.from_dict(values)

"""What a drafter's configuration means beyond Kimi's: windows by `use_swa`; what has no code is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hedgerow.model.dflash import DFlashModel
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.fields import ConfigError
from tests.tiny import TinyPaths, write_tiny
from tests.unit.test_checkpoint_faults import change_config

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture
def paths(tmp_path: Path) -> TinyPaths:
    return write_tiny(tmp_path)


def read(paths: TinyPaths, top: Mapping[str, Any], inner: Mapping[str, Any]) -> DraftConfig:
    """With these keys; None takes one away."""

    def change(config: dict[str, Any]) -> None:
        for where, keys in ((config, top), (config["dflash_config"], inner)):
            where.update(keys)
            for name in [name for name, value in keys.items() if value is None]:
                del where[name]

    change_config(paths.drafter, change)
    return DraftConfig.from_folder(paths.drafter)


NEUTRAL = {
    "attention_mode": ["gqa", "mha"], "attention_sink_bias": [False], "add_swa_attention_sink_bias": [False],
    "attention_value_scale": [1.0, 1], "partial_rotary_factor": [1.0], "sample_from_anchor": [False],
    "markov_rank": [0], "use_aux_hidden_state": [True], "draft_vocab_size": [512], "target_hidden_size": [64],
    "v_head_dim": [16], "is_neox_style": [True],
}  # fmt: skip
OTHER = {
    "attention_mode": "mla", "attention_sink_bias": True, "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": True, "attention_value_scale": 0.612, "partial_rotary_factor": 0.5,
    "sample_from_anchor": True, "markov_rank": 256, "use_aux_hidden_state": False, "draft_vocab_size": 32_000,
    "target_hidden_size": 4096, "v_head_dim": 8, "is_neox_style": False, "input_embedding_scale": 2.0,
    "output_multiplier": 0.5, "final_logit_softcapping": 30.0,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_what_there_is_no_code_for_is_refused_by_name_and_value(paths: TinyPaths, name: str) -> None:
    plain = DraftConfig.from_folder(paths.drafter)
    for value in NEUTRAL.get(name, []):
        assert read(paths, {name: value}, {}) == read(paths, {}, {name: value}) == plain
    for place in ("", "dflash_config."):
        fresh = write_tiny(paths.drafter.parent / f"again{len(place)}")
        given = {name: OTHER[name]}
        with pytest.raises(ConfigError) as error:
            read(fresh, {} if place else given, given if place else {})
        assert error.value.name == f"{place}{name}"
        assert str(error.value.value) == str(OTHER[name])
        assert "supported" in error.value.limit


@pytest.mark.parametrize("types", [None, [FULL, FULL]])
def test_use_swa_gives_every_layer_a_window_that_sees_both_ways(paths: TinyPaths, types: list[str] | None) -> None:
    config = read(
        paths,
        {"layer_types": types, "sliding_window": None, "use_sliding_window": None},
        {"use_swa": True, "swa_window_size": 24},
    )
    assert (config.windows, config.causal) == ((24, 24), (False, False))
    assert read(paths, {}, {"causal": True}).causal == (True, True)


def test_use_swa_computes_what_sliding_layers_that_see_both_ways_do(tmp_path: Path) -> None:
    drafts = []
    for name, top, inner in (
        ("a", {"layer_types": None, "sliding_window": None}, {"use_swa": True, "swa_window_size": 24}),
        ("b", {"layer_types": [SLIDING] * 2, "sliding_window": 24, "is_causal": False}, {}),
        ("c", {"layer_types": [FULL] * 2}, {}),
    ):
        paths = write_tiny(tmp_path / name)
        read(paths, top, inner)
        model = DFlashModel.load(paths.drafter, paths.target)
        state, features = model.new_state(), torch.randn(60, model.feature_width, generator=torch.manual_seed(1))
        model.append(state, features, 0)
        drafts.append(model.draft([state], [7], [60]))
    assert torch.equal(drafts[0], drafts[1])
    assert not torch.equal(drafts[0], drafts[2]), "a window that changes nothing would go unseen"


def test_layers_that_slide_already_keep_their_kind(paths: TinyPaths) -> None:
    config = read(
        paths, {"layer_types": [SLIDING, FULL], "sliding_window": 24}, {"use_swa": True, "swa_window_size": 24}
    )
    assert (config.windows, config.causal) == ((24, None), (True, False))


@pytest.mark.parametrize("use", [None, False])
def test_a_window_that_no_layer_has_means_nothing(paths: TinyPaths, use: bool | None) -> None:
    inner = {"swa_window_size": 24} | ({} if use is None else {"use_swa": use})
    assert read(paths, {"layer_types": [FULL, FULL], "use_sliding_window": False}, inner).windows == (None, None)


@pytest.mark.parametrize(
    ("top", "inner", "field", "limit"),
    [
        ({"sliding_window": 32}, {"swa_window_size": 24}, "sliding_window", "only 24 is supported"),
        ({"sliding_window": None}, {}, "sliding_window", "must be int"),
        ({"use_sliding_window": False}, {}, "use_sliding_window", "only True is supported"),
        ({}, {"swa_window_size": 0}, "dflash_config.swa_window_size", "must be at least 1"),
        ({"layer_types": [FULL, FULL]}, {"use_swa": 1}, "dflash_config.use_swa", "must be bool"),
        ({"layer_types": 7}, {}, "layer_types", "2 of 'sliding_attention' or 'full_attention'"),
    ],
)
def test_windows_that_are_none_are_refused(
    paths: TinyPaths, top: dict[str, Any], inner: dict[str, Any], field: str, limit: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read(paths, {"layer_types": [SLIDING, FULL], "sliding_window": 24} | top, inner)
    assert (error.value.name, error.value.limit) == (field, limit)

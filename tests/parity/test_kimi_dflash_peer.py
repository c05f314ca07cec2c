"""Kimi's published drafters in miniature against the PyPI package `dflash`: six layers, block 8, the real ids.

Twenty rounds of draft and commit, past the sliding layers' window; hidden states and proposals of every engine.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hedgerow.model.compiled_dflash import CompiledDFlash
from hedgerow.model.dflash import DFlashModel
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.loader import load_embedding_and_head
from hedgerow.model.projection import FeatureProjection
from tests.compiled_builds import missing_compiler
from tests.peers import TOLERANCE, DraftPeer, embed_block
from tests.tiny import TinyDrafter, TinyTarget, write_drafter, write_json, write_target

VOCABULARY, MASK = 163_840, 163_838
IDS = (1, 12, 24, 35, 47, 58)
SLIDING, FULL = "sliding_attention", "full_attention"
TARGET = TinyTarget(vocab=VOCABULARY, layers=1, positions=512)  # only its embedding and head are read
YARN = {
    "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
SHAPE = TinyDrafter(
    layers=6, heads=8, kv_heads=2, window=24, layer_types=(SLIDING,) * 5 + (FULL,), feature_layers=IDS,
    rope_scaling=YARN,
)  # fmt: skip
ROUNDS = 20


def z_lab(config: dict[str, Any]) -> None:
    """The block's size beside the ids, and no ids: 61 layers and six of its own decide them."""
    del config["block_size"], config["dflash_config"]["target_layer_ids"]


def nvidia(config: dict[str, Any]) -> None:
    """The form of transformers 5: the base within `rope_parameters`; the block's size on top."""
    scaling = config.pop("rope_scaling")
    scaling["rope_type"] = scaling.pop("type")
    config["rope_parameters"] = {**scaling, "rope_theta": config.pop("rope_theta")}
    del config["dflash_config"]["block_size"]


def both_ways(config: dict[str, Any]) -> None:
    """An explicit flag: no layer is causal within the block, sliding ones see as far ahead as back."""
    config["is_causal"] = False


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi") / "target"
    write_target(folder, TARGET)
    return folder


def write(folder: Path, layout: Any) -> None:
    write_drafter(folder, replace(TARGET, layers=61), SHAPE)
    config = json.loads((folder / "config.json").read_text())
    layout(config)
    write_json(folder / "config.json", config)


@pytest.mark.parametrize("layout", [z_lab, nvidia, both_ways])
def test_a_layout_is_read_as_it_is_meant(tmp_path: Path, layout: Any) -> None:
    write(tmp_path, layout)
    config = DraftConfig.from_folder(tmp_path)
    assert (config.target_layer_ids, config.block_size, config.mask_token_id) == (IDS, 8, MASK)
    assert config.windows == (24,) * 5 + (None,)
    assert config.causal == ((False,) * 6 if layout is both_ways else (True,) * 5 + (False,))
    assert config.rope.yarn is not None
    assert (config.rope.theta, config.rope.yarn.factor, config.rope.yarn.amplitude) == (50000.0, 64.0, 1.0)


@pytest.mark.parametrize("layout", [z_lab, nvidia, both_ways])
def test_hidden_states_and_proposals_are_the_packages(tmp_path: Path, target: Path, layout: Any) -> None:
    write(tmp_path, layout)
    model, peer = DFlashModel.load(tmp_path, target), DraftPeer(tmp_path, SHAPE.block)
    assert peer.model.target_layer_ids == list(IDS), "the package's own default"
    assert peer.model.mask_token_id == MASK
    others: list[Any] = [DFlashModel.load(tmp_path, target, projected=True)]
    if not missing_compiler():
        others += [CompiledDFlash.load(tmp_path, target, threads=2, projected=projected) for projected in (False, True)]
    project, head = FeatureProjection.load(tmp_path), load_embedding_and_head(target).head.float()
    models = [model, *others]
    states, end, fresh = [each.new_state() for each in models], 0, 30
    rng, g = random.Random(2), torch.Generator().manual_seed(2)
    for _ in range(ROUNDS):
        features, anchor = torch.randn(fresh, model.feature_width, generator=g), rng.randrange(VOCABULARY)
        for each, state in zip(models, states, strict=True):
            each.append(state, features if each.feature_width == model.feature_width else project(features), end)
        end += fresh
        expected = peer.round(features, embed_block(model, anchor), end)
        assert (model.hidden([states[0]], [anchor], [end])[0] - expected).abs().max() <= TOLERANCE
        logits = model.draft([states[0]], [anchor], [end])
        for each, state in zip(others, states[1:], strict=True):
            assert (each.draft([state], [anchor], [end]) - logits).abs().max() <= TOLERANCE
        by_package = peer.model.compute_logits(expected, lambda h: h @ head.T)
        assert torch.equal(logits[0].argmax(-1), by_package.argmax(-1))
        fresh = rng.randint(1, SHAPE.block)
    assert end > 2 * SHAPE.window, "the windows must have moved"


def test_what_is_projected_is_a_sixth_as_wide(tmp_path: Path, target: Path) -> None:
    write(tmp_path, z_lab)
    whole, narrow = DFlashModel.load(tmp_path, target), DFlashModel.load(tmp_path, target, projected=True)
    assert (whole.feature_width, narrow.feature_width) == (6 * TARGET.hidden, TARGET.hidden)
    assert FeatureProjection.load(tmp_path).hash == whole.checkpoint_hash


def test_the_package_takes_the_amplitude_that_the_config_says(tmp_path: Path, target: Path) -> None:
    """Without mscale the package scales cos and sin by 0.1 ln 64 + 1 = 1.41589; the default follows it there too."""
    write(tmp_path, z_lab)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_scaling"]["mscale"], config["rope_scaling"]["mscale_all_dim"]
    write_json(tmp_path / "config.json", config)
    default, told = DFlashModel.load(tmp_path, target), DFlashModel.load(tmp_path, target, amplitude=1.0)
    features = torch.randn(40, default.feature_width, generator=torch.Generator().manual_seed(3))
    expected = DraftPeer(tmp_path, SHAPE.block).round(features, embed_block(default, 7), 40)
    apart = []
    for model in (default, told):
        state = model.new_state()
        model.append(state, features, 0)
        apart.append(float((model.hidden([state], [7], [40])[0] - expected).abs().max()))
    assert apart[0] <= TOLERANCE
    assert apart[1] > 0.01

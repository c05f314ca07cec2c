"""A drafter that was made for another target is refused before a weight is read, with both values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hedgerow.model.card import CARD, AcceptanceCard
from hedgerow.model.fields import ConfigError
from hedgerow.model.fits import check_fit
from hedgerow.model.select import load_drafter
from tests.tiny import TinyDrafter, TinyPaths, write_json, write_tiny

YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64}


@pytest.fixture
def tiny(tmp_path: Path) -> TinyPaths:
    return write_tiny(tmp_path, drafter=TinyDrafter(rope_scaling=YARN))


def change(tiny: TinyPaths, changes: dict[str, Any]) -> None:
    """Dots lead into an object; None takes a field out."""
    config = json.loads((tiny.drafter / "config.json").read_text())
    for name, value in changes.items():
        *path, last = name.split(".")
        inside = config
        for part in path:
            inside = inside[part]
        inside.pop(last) if value is None else inside.update({last: value})
    write_json(tiny.drafter / "config.json", config)


def test_the_pair_fits(tiny: TinyPaths) -> None:
    check_fit(tiny.drafter, tiny.target)
    change(tiny, {"num_target_layers": None, "dflash_config.num_target_layers": None, "rope_scaling": None})
    check_fit(tiny.drafter, tiny.target)


@pytest.mark.parametrize(
    ("changes", "field", "theirs", "ours"),
    [
        ({"vocab_size": 513}, "vocab_size", "513", "512"),
        ({"hidden_size": 32}, "hidden_size", "32", "64"),
        ({"dflash_config.num_target_layers": 61}, "num_target_layers", "61", "3"),
        ({"dflash_config.target_layer_ids": [0, 3]}, "target_layer_ids", "0, 3", "3"),
        ({"dflash_config.target_layer_ids": [-1, 1]}, "target_layer_ids", "-1, 1", "3"),
        ({"dflash_config.mask_token_id": 258}, "mask_token_id", "258", "257, 258"),
        ({"dflash_config.mask_token_id": 512}, "mask_token_id", "512", "512"),
        ({"rope_theta": 1e6}, "rope_theta", "1000000", "50000"),
        ({"rope_scaling.factor": 32.0}, "rope_scaling.factor", "32.0", "64.0"),
        ({"rope_scaling.original_max_position_embeddings": 65}, "rope_scaling.original", "65", "64"),
    ],
)
def test_a_mismatch_names_the_field_and_both_values(
    tiny: TinyPaths, changes: dict[str, Any], field: str, theirs: str, ours: str
) -> None:
    change(tiny, changes)
    with pytest.raises(ConfigError) as refused:
        load_drafter(tiny.drafter, tiny.target, "torch")
    assert refused.value.name.removeprefix("dflash_config.") == field
    assert theirs in str(refused.value)
    assert ours in refused.value.limit


CARD_OF = {"prompt": [1, 2], "tokens": 20, "budget": 7, "topk_cap": 1, "tokens_per_step": 3.5}


def test_a_card_is_read(tmp_path: Path) -> None:
    assert AcceptanceCard.from_folder(tmp_path, 512) is None
    write_json(tmp_path / CARD, CARD_OF)
    assert AcceptanceCard.from_folder(tmp_path, 512) == AcceptanceCard((1, 2), 20, 7, 3.5, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", []), ("prompt", [512]), ("prompt", [-1]), ("prompt", [1] * 5000), ("tokens", 1), ("tokens", 5000),
        ("budget", 0), ("tokens_per_step", 0.5), ("tokens_per_step", 8.5), ("tokens_per_step", "3"),
    ],
)  # fmt: skip
def test_a_card_of_nonsense_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    write_json(tmp_path / CARD, {**CARD_OF, field: value})
    with pytest.raises(ConfigError) as refused:
        AcceptanceCard.from_folder(tmp_path, 512)
    assert refused.value.name == field

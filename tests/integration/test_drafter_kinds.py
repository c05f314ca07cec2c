"""The kinds of drafters as processes: what they are sent, what the stack says of them, and the same tokens of all."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import Client, process_status
from hedgerow.errors import Unavailable
from tests.polling import eventually
from tests.stack import ROOT, Models

PROMPT = "def f(a, b):\n    return a + b\n\n\ndef g(a, b):\n    return"
Settings = Mapping[str, Mapping[str, str]]


def config(
    tiny: Models,
    data: Path,
    settings: Settings,
    drafter: Path | None = None,
    lookup: bool = False,
    hosted: bool = False,
) -> Stack:
    return Stack(
        StackConfig(ROOT, tiny.target, data, drafter=drafter, lookup=lookup, hosted=hosted, settings=settings, budget=8)
    )


def facts(stack: Stack, name: str) -> Mapping[str, str]:
    return asyncio.run(process_status(stack.admin_address(name))).facts


def numbers(stack: Stack, name: str) -> Mapping[str, float]:
    return asyncio.run(process_status(stack.admin_address(name))).numbers


def texts(stack: Stack, budget: int) -> list[list[int]]:
    """Greedy and seeded."""
    with Client(stack.address("gateway")) as client:
        return [
            [
                t
                for chunk in client.generate(PROMPT, max_tokens=40, temperature=heat, seed=5, budget=budget)
                for t in chunk.tokens
            ]
            for heat in (0.0, 1.0)
        ]


def copied(tiny: Models, folder: Path, **changes: object) -> Path:
    shutil.copytree(tiny.drafter, folder)
    read = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**read, **changes}))
    return folder


def test_looking_the_text_up_needs_no_drafters_folder(tiny: Models, tmp_path: Path) -> None:
    with config(tiny, tmp_path, {}, lookup=True) as stack:
        assert texts(stack, 8) == texts(stack, 0)
        assert facts(stack, "drafter") == facts(stack, "drafter") | {"drafter": "lookup", "features": "tokens"}
        assert numbers(stack, "drafter")["hedgerow_drafter_nodes_total"] > 0
        assert numbers(stack, "verifier")["hedgerow_verifier_drafter_up"] == 1
        assert facts(stack, "verifier")["acceptance"] == "not measured: the drafter has no card"


def test_fc_on_the_verifiers_side_and_acceptance_below_the_card(tiny: Models, tmp_path: Path) -> None:
    drafter = copied(tiny, tmp_path / "drafter")
    card = {"prompt": [1, 2, 3], "tokens": 60, "budget": 7, "topk_cap": 1, "tokens_per_step": 5.0}
    (drafter / "acceptance.json").write_text(json.dumps(card))
    settings = {
        "drafter": {"FEATURES": "projected"},
        "verifier": {"FEATURES": "projected", "DRAFTER_PATH": str(drafter)},
    }
    with config(tiny, tmp_path / "data", settings, drafter=drafter) as stack:
        assert texts(stack, 8) == texts(stack, 0)
        assert numbers(stack, "drafter")["hedgerow_drafter_nodes_total"] > 0
        eventually(lambda: facts(stack, "verifier").get("acceptance", "").startswith("LOW: "))
        assert numbers(stack, "verifier")['hedgerow_verifier_acceptance_ratio{source="probe"}'] < 0.9
        assert any("level=warning" in line and "below its card" in line for line in stack.logs("verifier"))


def test_a_drafter_in_the_verifiers_process(tiny: Models, tmp_path: Path) -> None:
    drafter = copied(tiny, tmp_path / "drafter")
    card = {"prompt": [1, 2, 3], "tokens": 60, "budget": 7, "topk_cap": 1, "tokens_per_step": 1.0}
    (drafter / "acceptance.json").write_text(json.dumps(card))
    with config(tiny, tmp_path / "data", {}, drafter=drafter, hosted=True) as stack:
        assert stack.services == ("kvstore", "verifier", "gateway")
        assert texts(stack, 8) == texts(stack, 0)
        counted = numbers(stack, "verifier")
        assert counted['hedgerow_verifier_drafts_total{outcome="answered"}'] > 20
        assert counted['hedgerow_verifier_drafts_total{outcome="failed"}'] == 0
        assert counted["hedgerow_verifier_tree_nodes_sum"] > 0
        assert counted["hedgerow_verifier_drafter_up"] == 1
        eventually(lambda: "its card says 1.00" in facts(stack, "verifier").get("acceptance", ""))


def test_a_drafter_of_another_target_does_not_start_and_says_both_values(tiny: Models, tmp_path: Path) -> None:
    drafter = copied(tiny, tmp_path / "drafter", rope_theta=1e6)
    stack = config(tiny, tmp_path / "data", {}, drafter=drafter)
    with pytest.raises(Unavailable) as refused:
        stack.start()
    assert "rope_theta: 1000000.0 is not allowed: the target's, 50000.0" in refused.value.message


@pytest.mark.parametrize(
    ("by", "hosted", "low", "ranks"),
    [
        (0, False, False, 1), (1, False, True, 1), (-1, True, True, 1),
        pytest.param(1, False, True, 2, marks=pytest.mark.long),
        pytest.param(0, True, False, 2, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_layers_that_are_off_by_one_are_told_without_a_card(
    tmp_path: Path, by: int, hosted: bool, low: bool, ranks: int
) -> None:
    """The bundled drafter with its ids shifted and its card removed, in a process of its own and in the verifier's;
    and of a target on two ranks.
    """
    drafter = tmp_path / "drafter"
    shutil.copytree(ROOT / "models/sapling-dflash", drafter)
    (drafter / "acceptance.json").unlink()
    read = json.loads((drafter / "config.json").read_text())
    read["dflash_config"]["target_layer_ids"] = [layer + by for layer in (1, 4, 7)]
    (drafter / "config.json").write_text(json.dumps(read))
    verifier = {"verifier": {"TENSOR_PARALLEL": str(ranks), "ENGINE": "compiled"}} if ranks > 1 else {}
    started = StackConfig(
        ROOT, ROOT / "models/sapling", tmp_path / "data", drafter=drafter, hosted=hosted, settings=verifier
    )
    with Stack(started) as stack:
        assert facts(stack, "verifier").get("tensor_parallel", "1") == str(ranks)
        eventually(lambda: "tokens a step" in facts(stack, "verifier").get("acceptance", ""), 60, "the trial")
        said = facts(stack, "verifier")["acceptance"]
        assert said.startswith("LOW: ") == low, said
        assert (numbers(stack, "verifier")['hedgerow_verifier_acceptance_ratio{source="probe"}'] < 0.9) == low
        assert any("layers' neighbours" in line for line in stack.logs("verifier")) == low
        assert texts(stack, 8) == texts(stack, 0)

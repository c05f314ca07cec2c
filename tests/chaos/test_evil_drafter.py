"""A drafter that answers nonsense: refused and counted, and not one token is another."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hedgerow.cli.child import Child
from hedgerow.model.loader import load_embedding_and_head
from hedgerow.v1 import common_pb2
from services.verifier.convert import sampling_from
from tests.attach import TestGateway
from tests.evil_drafter import LATE, SILENT, STRANGER, TREES, WRONG_STEP
from tests.polling import eventually, soon
from tests.processes import address, service, started
from tests.stack import Models, Plain

PROMPT = list(b"for each in ")
SEEDED = common_pb2.SamplingParams(temperature=1.0, seed=99, max_tokens=48, ignore_eos=True)
WHY = {
    "cycle": "forward_parent",
    "forward": "forward_parent",
    "itself": "own_parent",
    "huge": "over_budget",
    "token": "token_out_of_range",
    "twins": "duplicate_sibling",
    "parent": "parent_out_of_range",
    "ragged": "length_mismatch",
}


def said(process: Child, *words: str) -> bool:
    """Whether one line of its log has all of `words`."""
    return any(all(word in line for word in words) for line in process.lines())


def describes(tiny: Models, plain: Plain) -> list[str]:
    """The arguments of a drafter that says it was made for this target."""
    head = load_embedding_and_head(tiny.target).hash
    return ["--vocab", str(plain.vocab_size), "--width", str(plain.feature_width), "--head", head]


@pytest.fixture(scope="module")
def evil(tiny: Models, tiny_plain: Plain) -> Iterator[str]:
    """Address of a verifier whose drafter answers the wrong trees in turn."""
    fits = describes(tiny, tiny_plain)
    layers = ",".join(map(str, tiny.feature_layers))
    with (
        started("tests.evil_drafter", *fits, "--layers", layers, "--kinds", ",".join(TREES)) as drafter,
        service(
            "verifier",
            model_path=tiny.target,
            model_name="evil",
            drafter=address(drafter),
            feature_layers=layers,
        ) as verifier,
    ):
        eventually(lambda: said(verifier, "the drafter is connected"))
        yield address(verifier)


async def test_every_kind_of_wrong_tree_is_refused_and_counted(evil: str, tiny_plain: Plain) -> None:
    async with TestGateway(evil) as gateway:
        for budget in (0, 2, 8, 63):
            await gateway.start(f"session-{budget}", PROMPT, SEEDED, budget=budget)
            await gateway.finished([f"session-{budget}"])
            assert gateway.tokens[f"session-{budget}"] == tiny_plain.tokens(PROMPT, sampling_from(SEEDED))
        load = await gateway.load()
    assert set(WHY) == set(TREES), "every kind has a reason"
    assert set(load.refused_trees) == set(WHY.values())
    assert sum(load.refused_trees.values()) > 100, "every step's tree was refused"
    assert (load.held_sequences, load.free_pages) == (0, load.total_pages)


async def test_answers_that_are_late_silent_or_for_somebody_else_cost_little_and_change_nothing(
    tiny: Models, tiny_plain: Plain
) -> None:
    """A drafter that makes steps wait is left alone for longer and longer; else each step would wait its 50 ms."""
    fits = describes(tiny, tiny_plain)
    layers = ",".join(map(str, tiny.feature_layers))
    kinds = ",".join([LATE, WRONG_STEP, STRANGER, SILENT])
    with (
        started("tests.evil_drafter", *fits, "--layers", layers, "--kinds", kinds, "--late", "0.2") as drafter,
        service(
            "verifier",
            model_path=tiny.target,
            model_name="late",
            drafter=address(drafter),
            feature_layers=layers,
            draft_timeout_ms=50,
        ) as verifier,
    ):
        await soon(lambda: said(verifier, "the drafter is connected"))
        async with TestGateway(address(verifier)) as gateway:
            began = time.monotonic()
            sampling = common_pb2.SamplingParams(temperature=1.0, seed=99, max_tokens=200, ignore_eos=True)
            await gateway.start("late", PROMPT, sampling, budget=8)
            await gateway.finished(["late"])
            assert gateway.tokens["late"] == tiny_plain.tokens(PROMPT, sampling_from(sampling))
            load = await gateway.load()
            waited = sum(message.timings.draft_ns for message in gateway.messages) / 1e9
            assert load.missed_drafts >= 3
            assert waited < 0.25 * 200 * 0.05, f"{waited:.2f} s of {time.monotonic() - began:.2f} s were waits"
            assert not load.refused_trees


@pytest.mark.parametrize(
    ("option", "value", "field"), [("--width", "3", "feature_width"), ("--head", "00" * 32, "head")]
)
async def test_a_drafter_of_another_target_is_not_used(
    tiny: Models, tiny_plain: Plain, option: str, value: str, field: str
) -> None:
    """One with another target's embedding and head has the right sizes, and would draft nonsense for ever."""
    layers = ",".join(map(str, tiny.feature_layers))
    described = [*describes(tiny, tiny_plain), "--layers", layers, option, value]  # the last of two counts
    with (
        started("tests.evil_drafter", *described) as drafter,
        service(
            "verifier",
            model_path=tiny.target,
            model_name="other",
            drafter=address(drafter),
            feature_layers=layers,
        ) as verifier,
    ):
        await soon(lambda: said(verifier, "level=error", "the drafter does not fit", field))
        async with TestGateway(address(verifier)) as gateway:
            await gateway.start("other", PROMPT, SEEDED, budget=8)
            await gateway.finished(["other"])
            assert gateway.tokens["other"] == tiny_plain.tokens(PROMPT, sampling_from(SEEDED))
            assert not (await gateway.load()).refused_trees

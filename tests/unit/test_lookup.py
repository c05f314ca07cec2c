"""Drafts from the session's own text: what is found, how it becomes a tree, and that no token depends on it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from bench.drive import Job, drive
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.reads import Tokens
from hedgerow.engine.step import LocalDrafter
from hedgerow.engine.tree import validate_tree
from hedgerow.engine.types import TreeNodes
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.errors import InvalidRequest
from hedgerow.model import lookup
from hedgerow.model.lookup import Guess, Lookup, best_first
from tests.engine_rig import EOS, SETTINGS, VOCABULARY, Rig, prompt

VOCAB = 512


def rows(tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.float32)[:, None]


def guesses(text: list[int], anchor: int, depth: int = 4) -> list[Guess]:
    model = Lookup(VOCAB, 4096, depth)
    state = model.new_state()
    for position, token in enumerate(text):
        model.append(state, rows([token]), position)
    return model.guesses(state, anchor)


def by_search(text: list[int], anchor: int, depth: int) -> list[Guess]:
    """As `guesses`, by looking at every place of the whole text."""
    whole, found = [*text, anchor], []
    for place in range(len(text), 1, -1):
        if len(text) and whole[place - 2 : place] == whole[-2:]:
            agreeing = 2
            while agreeing < min(place, lookup.MOST_AGREEING) and whole[place - 1 - agreeing] == whole[-1 - agreeing]:
                agreeing += 1
            tokens = whole[place : place + depth]
            while len(tokens) < depth:
                tokens.append(tokens[-(len(whole) - place)])
            found.append(Guess(tokens, agreeing))
    return found[: lookup.MOST_PLACES]


def test_what_followed_before_is_found_newest_first() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 8, 1, 2]
    assert guesses(text, 3) == [Guess([5, 6, 7, 8], 2), Guess([4, 9, 2, 3], 3)]
    assert guesses(text, 4) == []
    assert guesses([], 4) == []


def test_a_repetition_goes_on() -> None:
    assert guesses([7, 7, 7], 7)[0] == Guess([7, 7, 7, 7], 3)
    assert guesses([1, 2, 1, 2], 1, depth=5)[0] == Guess([2, 1, 2, 1, 2], 3)


@pytest.mark.parametrize("alphabet", [2, 3, 12])
def test_the_index_finds_what_a_search_of_the_text_finds(alphabet: int) -> None:
    choose = random.Random(alphabet)
    for _ in range(60):
        text = [choose.randrange(alphabet) for _ in range(choose.randint(1, 120))]
        anchor = choose.randrange(alphabet)
        assert guesses(text, anchor, 6) == by_search(text, anchor, 6), (text, anchor)


def test_trees_are_sound_and_hold_the_best_guess_first() -> None:
    choose = random.Random(0)
    for _ in range(200):
        text = [choose.randrange(3) for _ in range(90)]
        found = guesses(text, choose.randrange(3), 8)
        budget, cap = choose.randint(0, 20), choose.choice((0, 1, 2))
        tree = best_first(found, budget, cap)
        validate_tree(TreeNodes(*tree), budget=budget, topk_cap=cap, max_depth=budget, vocab_size=VOCAB)
        assert all(p <= 0 for p in tree.logprobs)
        assert tree.logprobs == sorted(tree.logprobs, reverse=True)
        if found and budget:
            best = max(found, key=lambda guess: guess.agreeing)
            assert tree.tokens[0] in {guess.tokens[0] for guess in found}
            alone = best_first([best], budget, cap)
            assert alone.tokens == list(best.tokens)[: len(alone.tokens)]
            assert alone.parents == list(range(-1, len(alone.tokens) - 1))


def test_long_agreement_outweighs_many_short_ones() -> None:
    found = [Guess([1, 1], 2), Guess([1, 1], 2), Guess([2, 2], 9)]
    assert best_first(found, 2, 0).tokens == [2, 2]


def test_a_long_text_forgets_its_older_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MOST_KEPT", 64)
    model = Lookup(VOCAB, 4096)
    state = model.new_state()
    for position in range(500):
        model.append(state, rows([position % 50]), position)
        assert len(state.tokens) <= 64
    assert state.end == 500
    assert state.tokens[-1] == 499 % 50


def test_what_is_no_token_is_refused() -> None:
    model = Lookup(VOCAB, 4096)
    state = model.new_state()
    with pytest.raises(InvalidRequest, match="512"):
        model.append(state, rows([VOCAB]), 0)
    with pytest.raises(InvalidRequest, match="position"):
        model.append(state, rows([1]), 1)
    assert state.end == 0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


@pytest.mark.parametrize("setting", SETTINGS)
async def test_no_token_depends_on_what_is_looked_up(rig: Rig, setting: str) -> None:
    """Prompts that repeat themselves; of the last one the output does too, for a bias makes it."""
    texts = {f"{n}": (prompt(4, n) * 9)[: 30 + n] for n in range(4)}
    jobs = [
        Job(name, text, replace(SETTINGS[setting], seed=n, max_tokens=60), budget=12, topk_cap=n % 2 * 3)
        for n, (name, text) in enumerate(texts.items())
    ]
    loops = replace(jobs[0].sampling, logit_bias={3: 50.0, 4: 49.0})
    jobs.append(replace(jobs[0], name="loops", sampling=loops))
    engine = VerifierEngine(rig.model, EngineConfig(pages=64, prefill_rows=16), VOCABULARY, EOS, Tokens())
    drafts = DrafterEngine(Lookup(VOCAB, rig.model.config.max_position_embeddings), DrafterConfig())
    run = await drive(engine, LocalDrafter(drafts), jobs)
    assert run.tokens == rig.plain_all(jobs)
    assert run.usage["loops"].accepted_draft_tokens > 20, "it must have been of use"


async def test_a_drafter_that_lost_its_state_is_told_the_text_again(rig: Rig) -> None:
    job = Job("a", prompt(4) * 12, replace(SETTINGS["greedy"], max_tokens=60), budget=8)
    engine = VerifierEngine(rig.model, EngineConfig(pages=64), VOCABULARY, EOS, Tokens())
    drafts = DrafterEngine(Lookup(VOCAB, 4096), DrafterConfig())

    class Forgetful(LocalDrafter):
        calls = 0

        async def draft(self, batch):  # type: ignore[no-untyped-def]
            self.calls += 1
            if self.calls == 9:
                self.engine.drop_all()
            return await super().draft(batch)

    drafter = Forgetful(drafts)
    run = await drive(engine, drafter, [job])
    assert run.tokens["a"] == rig.plain(job)
    (state,) = drafts._states.values() if drafts.held else [None]
    assert drafter.calls > 10
    assert state is None or state.start == 0

"""DFlash 2 on both CPU engines against the PyPI package `dflash`: twenty rounds of draft and commit."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hedgerow.model.compiled_dflash import CompiledDFlash
from hedgerow.model.dflash import DFlashModel
from hedgerow.model.loader import load_embedding_and_head
from hedgerow.model.selector import FromPairs, Selector
from tests.dflash2 import SHAPES, write_dflash2
from tests.peers import TOLERANCE, DraftPeer, embed_block
from tests.tiny import TinyTarget, write_target

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from dflash.model import DFlash2DraftModel, _make_cache
    from transformers import Qwen3Config

TARGET = TinyTarget(layers=3, positions=512)
ROUNDS = 20


class Peer(DraftPeer):
    """The package's second model, with its own cache."""

    def __init__(self, folder: Path, block: int) -> None:
        config = Qwen3Config(**json.loads((folder / "config.json").read_text()))
        config._attn_implementation = "sdpa"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = DFlash2DraftModel(config).eval().float()
        named = {"candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"}
        tensors = load_file(folder / "model.safetensors")
        self.model.load_state_dict(
            {name + ".weight" if name in named else name: t.float() for name, t in tensors.items()}, strict=True
        )
        self.cache, self.block = _make_cache(config), block


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dflash2") / "target"
    write_target(folder, TARGET)
    return folder


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_hidden_states_and_proposals_are_the_packages(tmp_path: Path, target: Path, name: str, dotted: bool) -> None:
    shape, causal, sizes = SHAPES[name]
    write_dflash2(tmp_path, TARGET, shape, causal, sizes, dotted)
    model, peer = DFlashModel.load(tmp_path, target), Peer(tmp_path, shape.block)
    selector = Selector.find(tmp_path, model.config)
    assert selector is not None
    compiled = CompiledDFlash.load(tmp_path, target)
    engines = [(engine, engine.new_state(), FromPairs(engine, selector)) for engine in (model, compiled)]
    head, end, fresh = load_embedding_and_head(target).head.float(), 0, 30
    rng, g = random.Random(2), torch.Generator().manual_seed(2)
    moved = 0
    for _ in range(ROUNDS):
        features, anchor = torch.randn(fresh, model.feature_width, generator=g), rng.randrange(TARGET.vocab)
        for engine, state, _ in engines:
            engine.append(state, features, end)  # type: ignore[arg-type]
        end += fresh
        expected = peer.round(features, embed_block(model, anchor), end)
        chain = peer.model.propose(expected[None], torch.tensor([anchor]), lambda h: h @ head.T, 0.0)[0][0].tolist()
        for engine, state, proposer in engines:
            hidden = engine.draft_states([state], [anchor], [end])[1]  # type: ignore[list-item]
            assert (hidden[0] - expected).abs().max() <= TOLERANCE
            proposed = proposer.propose([state], [anchor], [end], [shape.block - 1], [1])
            assert proposed.trees[0].tokens == chain
            assert proposed.trees[0].parents == list(range(-1, shape.block - 2))
        moved += chain != (expected @ head.T).argmax(-1).tolist()
        fresh = rng.randint(1, shape.block)
    assert end > 2 * shape.window
    assert moved > ROUNDS / 2, "a selector that changes nothing would go unseen"


@torch.inference_mode()
def test_pairwise_scores_are_the_packages(tmp_path: Path, target: Path) -> None:
    """The tree's conditional probabilities: the package's softmax of 16 times the mass that the marginal gives them."""
    shape, causal, sizes = SHAPES["causal in sliding layers"]
    write_dflash2(tmp_path, TARGET, shape, causal, sizes)
    model, peer = DFlashModel.load(tmp_path, target), Peer(tmp_path, shape.block)
    selector, state = Selector.find(tmp_path, model.config), model.new_state()
    assert selector is not None
    model.append(state, torch.randn(9, model.feature_width, generator=torch.Generator().manual_seed(1)), 0)
    logits, hidden = model.draft_states([state], [7], [9])
    pairs = selector.pairs(logits, hidden, torch.tensor([7]), torch.tensor([0]))
    theirs: Any = peer.model.candidate_selector
    projected = theirs.hidden_projection(hidden[0])
    for d in range(shape.block - 1):
        tokens = pairs.tokens[0, d]
        mass = logits[0, d].softmax(-1)[tokens].sum()
        for row in range(16 if d else 1):
            before = pairs.tokens[0, d - 1, row] if d else torch.tensor(7)
            added = theirs.successor_codebook(tokens) @ (theirs.predecessor_codebook(before) * projected[d])
            expected = ((logits[0, d][tokens] + added).softmax(-1) * mass)[pairs.choice[0, d, row]]
            assert (pairs.logprobs[0, d, row].exp() - expected).abs().max() <= 1e-5

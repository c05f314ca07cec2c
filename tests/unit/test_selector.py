"""Conditional trees of a drafter: what a selector changes, what caps leave, and that no token depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.drive import Job, drive
from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.step import LocalDrafter
from hedgerow.engine.tree import validate_tree
from hedgerow.engine.types import TreeNodes
from hedgerow.errors import HedgerowError
from hedgerow.model.compiled_dflash import CompiledDFlash
from hedgerow.model.dflash import DFlashModel
from hedgerow.model.selector import BESIDE, FromPairs, Selector, Trees, build, drafts
from hedgerow.rpc.config import ConfigError
from kernels.tree_build import plain_trees, top_logprobs
from services.drafter.config import DrafterServiceConfig
from services.drafter.loading import load
from services.verifier.config import IN_PROCESS, VerifierServiceConfig
from services.verifier.hosted import load_hosted
from tests.compiled_builds import missing_compiler
from tests.engine_rig import SETTINGS, Rig, prompt
from tests.tiny import TinyPaths, write_json, write_tiny

VOCAB, HIDDEN, RANK = 512, 64, 8
needs_compiler = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())


def write_selector(drafter: Path, gain: float = 1.0, rank: int = RANK, top_k: int = 16) -> None:
    """Beside a drafter's weights; with a gain of 0 it changes nothing."""
    g, folder = torch.Generator().manual_seed(3), drafter / BESIDE
    folder.mkdir()
    tensors = {
        "candidate_selector.predecessor_codebook": torch.randn(VOCAB, rank, generator=g).bfloat16(),
        "candidate_selector.successor_codebook": gain * torch.randn(VOCAB, rank, generator=g).bfloat16(),
        "candidate_selector.hidden_projection.weight": torch.randn(rank, HIDDEN, generator=g).bfloat16(),
    }
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", {"selector_rank": rank, "selector_top_k": top_k})


@pytest.fixture
def tiny(tmp_path: Path) -> TinyPaths:
    return write_tiny(tmp_path)


def pair(tiny: TinyPaths) -> tuple[DFlashModel, Selector]:
    model = DFlashModel.load(tiny.drafter, tiny.target)
    selector = Selector.find(tiny.drafter, model.config)
    assert selector is not None
    return model, selector


def test_without_a_selector_there_is_none(tiny: TinyPaths) -> None:
    assert Selector.find(tiny.drafter, DFlashModel.load(tiny.drafter, tiny.target).config) is None


@needs_compiler
def test_conditional_trees_are_the_default_where_they_pay(tiny: TinyPaths) -> None:
    """With a selector, on the engine that has a form of its own of them; else only where they are asked for."""
    compiled, plain = (kind.load(tiny.drafter, tiny.target) for kind in (CompiledDFlash, DFlashModel))
    for trees in ("auto", "conditional", "marginal"):
        assert drafts(compiled, tiny.drafter, trees) is compiled, "there is no selector"
    write_selector(tiny.drafter)
    asked: tuple[tuple[Trees, bool, bool], ...] = (
        ("auto", True, False), ("conditional", True, True), ("marginal", False, False),
    )  # fmt: skip
    for trees, of_compiled, of_plain in asked:
        assert isinstance(drafts(compiled, tiny.drafter, trees), FromPairs) == of_compiled
        assert isinstance(drafts(plain, tiny.drafter, trees), FromPairs) == of_plain


@needs_compiler
def test_so_they_are_in_both_processes(tiny: TinyPaths) -> None:
    given = {"listen": "127.0.0.1:0", "model_path": tiny.drafter, "target_path": tiny.target, "engine": "compiled"}
    hosting = {
        "listen": "127.0.0.1:0", "model_path": tiny.target, "model_name": "m", "drafter": IN_PROCESS,
        "drafter_path": tiny.drafter, "engine": "compiled",
    }  # fmt: skip

    def made(**more: object) -> str:
        return load(DrafterServiceConfig(**(given | more))).trees  # type: ignore[arg-type]

    def hosted(**more: object) -> object:
        return load_hosted(VerifierServiceConfig(**(hosting | more))).engine._model  # type: ignore[arg-type]

    assert made() == "marginal"
    assert not isinstance(hosted(), FromPairs)
    with pytest.raises(ConfigError, match=r"HEDGEROW_TREES.*conditional.*has no selector"):
        made(trees="conditional")
    with pytest.raises(ConfigError, match=r"HEDGEROW_TREES.*conditional.*has no selector"):
        hosted(trees="conditional")
    write_selector(tiny.drafter)
    assert (made(), made(trees="marginal"), made(engine="torch")) == ("conditional", "marginal", "marginal")
    assert isinstance(hosted(), FromPairs)
    assert not isinstance(hosted(trees="marginal"), FromPairs)
    assert isinstance(hosted(trees="conditional", engine="torch"), FromPairs)


def test_a_selector_that_adds_nothing_gives_the_marginals_trees(tiny: TinyPaths) -> None:
    write_selector(tiny.drafter, gain=0.0)
    model, selector = pair(tiny)
    state = model.new_state()
    model.append(state, torch.randn(20, model.feature_width, generator=torch.Generator().manual_seed(0)), 0)
    for budget in (1, 8, 14):
        (tree,) = FromPairs(model, selector).propose([state], [5], [20], [budget], [0]).trees
        (plain,) = plain_trees(model.draft([state], [5], [20]), [budget], [0])
        assert (tree.tokens, tree.parents) == (plain.tokens, plain.parents)
        assert tree.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_a_tokens_probability_is_that_after_its_parent(tiny: TinyPaths) -> None:
    """Node by node against the formula, in float64."""
    write_selector(tiny.drafter)
    model, s = pair(tiny)
    state = model.new_state()
    model.append(state, torch.randn(20, model.feature_width, generator=torch.Generator().manual_seed(0)), 0)
    (tree,) = FromPairs(model, s).propose([state], [5], [20], [24], [0]).trees
    logits, hidden = (part[0].double() for part in model.draft_states([state], [5], [20]))
    depth = [0] * len(tree.tokens)
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        d = depth[node] = depth[parent] + 1 if parent >= 0 else 0
        best = top_logprobs(logits[None, d : d + 1].float(), 16).tokens[0, 0]
        before = s.predecessor[tree.tokens[parent] if parent >= 0 else 5].double() * (hidden[d] @ s.projection.double())
        scores = logits[d][best] + s.successor[best].double() @ before
        mass = logits[d].softmax(-1)[best].sum()
        share = scores.softmax(-1)[(best == token).nonzero()[0, 0]] * mass
        above = tree.logprobs[parent] if parent >= 0 else 0.0
        assert tree.logprobs[node] == pytest.approx(above + float(share.log()), abs=1e-3)


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_a_cap_leaves_so_many_tokens_a_depth(tiny: TinyPaths, cap: int) -> None:
    write_selector(tiny.drafter)
    model, selector = pair(tiny)
    state, proposer = model.new_state(), FromPairs(model, selector)
    model.append(state, torch.randn(20, model.feature_width, generator=torch.Generator().manual_seed(0)), 0)
    capped, whole = proposer.propose([state, state], [5, 5], [20, 20], [30, 30], [cap, 0]).trees
    validate_tree(TreeNodes(*capped), budget=30, topk_cap=cap, max_depth=30, vocab_size=VOCAB)
    assert capped.tokens[0] == whole.tokens[0]
    if cap == 1:
        assert capped.parents == list(range(-1, len(capped.tokens) - 1))
        assert len(capped.tokens) == model.block_size - 1


def test_what_cannot_be_ranked_still_gives_sound_trees(tiny: TinyPaths) -> None:
    write_selector(tiny.drafter)
    _, selector = pair(tiny)
    logits, hidden = torch.zeros(2, 7, VOCAB), torch.zeros(2, 7, HIDDEN)
    logits[0, 2, 5], hidden[1, 3, 3] = float("nan"), float("inf")
    pairs = selector.pairs(logits, hidden, torch.tensor([1, 2]), torch.tensor([0, 2]))
    assert not pairs.logprobs.isnan().any()
    for tree, cap in zip(build(pairs, [20, 20]), (0, 2), strict=True):
        validate_tree(TreeNodes(*tree), budget=20, topk_cap=cap, max_depth=20, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"selector_top_k": 32}, "selector_top_k"), ({"selector_top_k": 0}, "selector_top_k"),
        ({"selector_rank": 9}, "predecessor_codebook"), ({"selector_rank": None}, "selector_top_k"),
    ],
)  # fmt: skip
def test_a_selector_that_does_not_fit_is_refused_by_name(
    tiny: TinyPaths, changes: dict[str, int | None], said: str
) -> None:
    write_selector(tiny.drafter)
    config = {"selector_rank": RANK, "selector_top_k": 16} | changes
    write_json(tiny.drafter / BESIDE / "config.json", config)
    with pytest.raises(HedgerowError, match=said):
        pair(tiny)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


@pytest.mark.parametrize("setting", SETTINGS)
async def test_no_token_depends_on_conditional_trees(rig: Rig, tmp_path: Path, setting: str) -> None:
    paths = write_tiny(tmp_path)
    write_selector(paths.drafter)
    model = rig.draft_model
    assert isinstance(model, DFlashModel)
    selector = Selector.find(paths.drafter, model.config)
    assert selector is not None
    jobs = [
        Job(f"{n}", prompt(3 + 9 * n, n), replace(SETTINGS[setting], seed=n, max_tokens=40), budget=(12, 1, 16)[n],
            topk_cap=(0, 0, 2)[n], arrives=n)
        for n in range(3)
    ]  # fmt: skip
    engine = DrafterEngine(FromPairs(model, selector), DrafterConfig())
    run = await drive(rig.engine(prefill_rows=16), LocalDrafter(engine), jobs)
    assert run.tokens == rig.plain_all(jobs)
    assert sum(usage.draft_tokens for usage in run.usage.values()) > 100

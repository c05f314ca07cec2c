"""No op writes beside its outputs and workspaces: other tests' cases again, every allocation between guard bands.

What has gone wrong elsewhere in this kind of kernel, and the tests that would show it here (tests/gpu, but as marked):

| mistake | tests |
|---|---|
| graph or mask sized by the block instead of budget + 1; wrong near the longest context | test_mla_tree_attention: SHAPES of 1, 2, 16, 33, 64 rows in one batch, the_last_slot_of_a_full_table; test_tree_ops: a_tree_is_the_heaps (budgets 0 to 63, blocks of 5 and 7) |
| a tree's accepted rows not compacted, or past their room; lengths not followed | test_tree_ops: accepted_latents_stand_where_plain_decoding_puts_them; test_cuda_k2: a_step_in_one_pass_is_the_three_passes; test_cuda_rebuilt: a_session_in_trees_has_the_bits_of_plain_decoding |
| rejected slots that are read | test_mla_tree_attention: slots_that_no_row_sees_change_nothing (NaN and other numbers); attention_cases fills every slot without a key with NaN |
| the key of a parent that was not chosen | test_mla_tree_attention: a_row_in_a_tree_has_the_bits_of_plain_decoding (path by path, from copies in order) |
| int32 page * stride | page_numbers_past_two_to_the_31_elements (tree, prefill), test_tree_ops: slots_beyond_two_to_the_31_elements |
| library products that read past the allocation, or search while a graph is captured | none is called: tests/unit/test_gpu_attention, a_steps_products_are_our_own |
| a workspace too small, at one row most of all | here |
| sorted ids read past their end; -1 from padding | test_model_ops: expert_lists, int4_moe, route_takes_the_lowest_id_of_equals_and_no_padding; here |
| padded rows routed or computed | test_model_ops: int4_moe ("padding was computed"), row_attention; test_mla_tree_attention: padding rows are zeros, no_sequence_has_rows |
| locks that outlive a launch | test_mla_tree_attention, test_tree_ops: a_graph_reads_...: the same graph again and again, in other sizes |
| index -1 where nothing was accepted | test_tree_ops: the_walk_is_the_oracles (sequences without rows among others), what_is_emitted_is_what_the_cpu_emits |
| log-sum-exp to two bases; parts merged wrongly | test_mla_tree_attention: all_forms_have_the_same_bits (widths 64 to 1,024); test_block_attention: a_block_sees_its_context (split against one launch); test_tree_ops: top_tokens_of_four_shards_are_those_of_the_whole |
| NaN logits become tokens | test_tree_ops: a_row_that_cannot_be_drawn_draws_no_token, rows_that_cannot_be_ranked_have_no_probability; test_cuda_walk: a_row_that_cannot_be_drawn_is_named |
| fully masked row; q_len 1, 2, 64; L = 0, 1, 63, 64, 65 | test_mla_tree_attention: a_row_without_ancestors_sees_the_prefix_only, SHAPES |
| strided and odd inputs | tests/unit/test_gpu_attention: refused by name; test_tree_ops, test_block_attention: what_does_not_fit_is_refused_by_name; test_model_ops: linear_refuses_by_name |
"""  # noqa: E501  a table

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import tests.gpu.test_block_attention as blocks
import tests.gpu.test_model_ops as model_ops
import tests.gpu.test_tree_ops as tree_ops
from kernels.gpu import block_attention, draft_block, int4_moe, kv_compact, kv_write, linear, topk_logprobs, tree_build
from kernels.gpu import draw as drawing
from tests.gpu.bands import banded

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy under the interpreter: a masked lane divides by zero
]
CASES: dict[str, list[Callable[[], None]]] = {
    "tree_build": [
        *(lambda s=s: tree_ops.test_masks_and_depths_of_a_tree_are_the_references(*s) for s in tree_build.TEST_SHAPES),
        lambda: tree_ops.test_a_tree_is_the_heaps("flat"),
    ],
    "topk_logprobs": [
        *(lambda s=s: tree_ops.test_top_tokens_are_the_references(*s, "grid") for s in topk_logprobs.TEST_SHAPES),
        tree_ops.test_top_tokens_of_four_shards_are_those_of_the_whole,
    ],
    "draw": [lambda s=s: tree_ops.test_draws_are_the_references(*s, True) for s in drawing.TEST_SHAPES],
    "tree_accept": [tree_ops.test_what_is_emitted_is_what_the_cpu_emits],
    "linear": [lambda s=s: model_ops.test_linear(*s) for s in linear.TEST_SHAPES],
    "int4_moe": [lambda s=s: model_ops.test_int4_moe(*s) for s in int4_moe.TEST_SHAPES],
    "draft_block": [lambda s=s: model_ops.test_draft_block(*s, 20, True) for s in draft_block.TEST_SHAPES],
    "block_attention": [
        lambda s=s: blocks.test_a_block_sees_its_context(*s, 300, True) for s in block_attention.TEST_SHAPES
    ],
}


@pytest.mark.parametrize("op", CASES)
def test_nothing_is_written_beside(op: str) -> None:
    if INTERPRETED and op in ("tree_build", "draw", "tree_accept"):
        pytest.skip("minutes")
    for case in CASES[op][: 1 if INTERPRETED else None]:
        with banded():
            case()


def test_a_cache_is_written_where_it_should_be() -> None:
    """The first and the last slot among the targets, slot -1 among the rows."""
    for width in (160, 576):
        with banded():
            cache = torch.empty(2, 2, 64, width, device=tree_ops.DEVICE).fill_(1.0)
            at = torch.tensor([127, -1, 0, 64], device=tree_ops.DEVICE)
            values = torch.randn(4, width, device=tree_ops.DEVICE)
            kv_write.kv_write(cache[0], at, values)
            flat = cache[0].view(128, width)
            assert torch.equal(flat[at[[0, 2, 3]]], values[[0, 2, 3]])
            slots = torch.tensor([0, 1, 64, 127, 126], device=tree_ops.DEVICE)
            before = cache.view(2, 128, width).clone()
            kv_compact.kv_compact(
                cache, slots, tree_ops.ints([0, 3, 5]), tree_ops.ints([0, 2, 0, 1]).view(2, 2), tree_ops.ints([2, 2])
            )
            before[:, 1] = before[:, 64]
            assert torch.equal(cache.view(2, 128, width), before)


@pytest.mark.parametrize("at", [4095, 4096 + 16])
def test_a_byte_beside_is_seen(at: int) -> None:
    seen = pytest.raises(AssertionError, match="1 bytes beside an allocation of 16 were written")
    with seen, banded() as bands:
        assert torch.empty(3, dtype=torch.float32).isnan().all()
        bands.held[0][at] = 7


@pytest.mark.skipif(INTERPRETED, reason="Gluon is not interpreted")
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (128, 32)])
@pytest.mark.parametrize("form", range(5), ids=["narrow", "two_pages", "wide", "portable", "gluon"])
def test_attention_writes_nothing_beside(form: int, latent: int, rope: int) -> None:
    """Both cuts of the merge; in the second case one sequence has more splits than the workspace."""
    from tests.gpu import attention_cases as cases

    for prefixes, counts in [([65], [33]), ([4000, 63, 1, 128], [1, 64, 2, 16])]:
        b = cases.batch(prefixes, counts, width=64, latent=latent, rope=rope, padding=3)
        for columns in (64, 0):
            with banded():
                cases.attend(b, cases.FORMS[form]._replace(columns=columns), splits=32)

"""The probabilities of DFlash 2's candidate selector, each token's after each of the position before it.

    S_d(a, b) = q_d(b) + sum_r P[a, r] h_d[r] N[b, r]            a: the anchor, or a candidate of depth d - 1
    out_d(a, b) = log softmax_b S_d(a, b) + log sum_c exp q_d(c)      at most 0; b among the K candidates of depth d

q: log-marginals of the candidates (`topk_logprobs`); h: the block's states, projected; P, N: the codebooks. Rows of
`out` descend and `choice` names their candidates, of equals in their order: what kernels/gpu/tree_pairs.py takes. A cap
leaves at each depth that many candidates, the best after the likeliest path; the others get -inf in every row. So does
what is no number. One program a sequence, which follows that path from depth to depth; nothing is sent to the host.

logprobs and tokens [S, L, K], state [S, L, R] float32, anchors and caps [S] int32, codebooks [V, R] -> [S, L, K, K].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import FLOATS, at_most, expect
from kernels.gpu.follow import follow, followed
from kernels.tree_pairs import MOST_WIDTH

TEST_SHAPES = [(1, 7, 16, 24), (3, 2, 5, 16), (2, 4, 31, 100)]  # (S, L, K, R)
BENCH_SHAPES = [(1, 7, 16, 256), (8, 7, 16, 256), (64, 7, 16, 256)]


def reference(
    logprobs: torch.Tensor,
    tokens: torch.Tensor,
    state: torch.Tensor,
    anchors: torch.Tensor,
    caps: torch.Tensor,
    predecessor: torch.Tensor,
    successor: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and choice, by torch ops, sequence by sequence."""
    sequences, depth, k = tokens.shape
    out, choice = logprobs.new_zeros(sequences, depth, k, k), tokens.new_zeros(sequences, depth, k, k)
    for s in range(sequences):
        before, likeliest = anchors[s].long().expand(k), 0
        for d in range(depth):
            here = tokens[s, d].long()
            scores = logprobs[s, d] + (predecessor[before].float() * state[s, d]) @ successor[here].float().T
            found = scores.log_softmax(-1) + logprobs[s, d].logsumexp(-1)
            found = found.clamp(max=0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
            ranked = found[likeliest].sort(descending=True, stable=True).indices
            if 0 < int(caps[s]) < k:
                found[:, ranked[int(caps[s]) :]] = -torch.inf
            best = found.sort(dim=-1, descending=True, stable=True)
            out[s, d], choice[s, d] = best.values, best.indices.to(choice.dtype)
            before, likeliest = here, int(ranked[0])
    return out, choice


@triton.jit
def _places(values, width, KB: tl.constexpr):
    """Each value's place in its row, the greatest first, of equals the leftmost; [KB, KB]."""
    b = tl.arange(0, KB)[None, :]
    place = tl.zeros((KB, KB), tl.int32)
    c = 0
    while c < width:  # of a `range` over a value the interpreter knows nothing
        one = tl.max(tl.where(b == c, values, float("-inf")), 1)[:, None]
        place += ((one > values) | ((one == values) & (c < b))).to(tl.int32)
        c += 1
    return place


@triton.jit
def _pair_scores(
    logprobs, tokens, state, anchors, caps, predecessor, successor, out, choice, anchor_step, width,
    DEPTH: tl.constexpr, RANK: tl.constexpr, KB: tl.constexpr, RB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    s = tl.program_id(0).to(tl.int64)
    a, b, r = tl.arange(0, KB), tl.arange(0, KB), tl.arange(0, RB)
    real = b < width
    cap = tl.load(caps + s)
    cap = tl.where(cap > 0, cap, width)
    anchor = tl.load(anchors + s * anchor_step)
    likeliest = 0
    for d in range(DEPTH):
        line = s * DEPTH + d
        here = tl.load(tokens + line * width + b, mask=real, other=0).to(tl.int64)
        before = tl.load(tokens + (line - 1) * width + a, mask=(a < width) & (d > 0), other=0)
        before = tl.where(d > 0, before, anchor).to(tl.int64)
        scores = tl.zeros((KB, KB), tl.float32)
        for begin in range(0, RANK, RB):
            column = begin + r
            live = (column < RANK)[None, :]
            left = tl.load(predecessor + before[:, None] * RANK + column[None, :], mask=live, other=0.0)
            right = tl.load(successor + here[:, None] * RANK + column[None, :], mask=live, other=0.0)
            h = tl.load(state + line * RANK + column, mask=column < RANK, other=0.0)
            left = left.to(tl.float32) * h[None, :]
            scores = tl.dot(left, tl.trans(right.to(tl.float32)), scores, input_precision="ieee")
        q = tl.load(logprobs + line * width + b, mask=real, other=float("-inf"))
        scores += q[None, :]
        peak = tl.max(scores, 1)[:, None]
        top = tl.max(q, 0)
        mass = top + tl.log(tl.sum(tl.exp(q - top), 0))
        found = scores - peak - tl.log(tl.sum(tl.exp(scores - peak), 1))[:, None] + mass
        found = tl.where(found == found, tl.minimum(found, 0.0), float("-inf"))
        place = _places(found, width, KB)
        ranked = tl.sum(tl.where((a == likeliest)[:, None], place, 0), 0)  # each candidate's place after the path
        likeliest = tl.sum(tl.where(real & (ranked == 0), b, 0), 0)
        if cap < width:
            found = tl.where((ranked < cap)[None, :], found, float("-inf"))
            place = _places(found, width, KB)
        inside = (a < width)[:, None] & real[None, :]
        at = (line * width + a[:, None]) * width + place
        tl.store(out + at, found, mask=inside)
        tl.store(choice + at, b[None, :] + tl.zeros((KB, KB), tl.int32), mask=inside)


def pair_scores(
    logprobs: torch.Tensor,
    tokens: torch.Tensor,
    state: torch.Tensor,
    anchors: torch.Tensor,
    caps: torch.Tensor,
    predecessor: torch.Tensor,
    successor: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out float32 and choice int32 [S, L, K, K] in one launch, without a host sync. K at most 31.

    anchors may be parts of wider rows; they and `tokens` are within the vocabulary: not checked here. ValueError names
    what does not fit.
    """
    expect("tokens", tokens, torch.int32, (None, None, None))
    sequences, depth, width = tokens.shape
    expect("logprobs", logprobs, torch.float32, tokens.shape)
    expect("predecessor", predecessor, FLOATS, (None, None))
    rank = predecessor.shape[1]
    expect("successor", successor, predecessor.dtype, predecessor.shape)
    expect("state", state, torch.float32, (sequences, depth, rank))
    expect("caps", caps, torch.int32, (sequences,))
    if tuple(anchors.shape) != (sequences,) or anchors.dtype != torch.int32:
        raise ValueError(f"anchors are {anchors.dtype} {tuple(anchors.shape)}, expected torch.int32 ({sequences},)")
    at_most("width", width, MOST_WIDTH)
    out = torch.empty((sequences, depth, width, width), dtype=torch.float32, device=tokens.device)
    choice = torch.empty_like(out, dtype=torch.int32)
    if out.numel():
        _pair_scores[(sequences,)](
            logprobs, tokens, state, anchors, caps, predecessor, successor, out, choice, anchors.stride(0), width,
            DEPTH=depth, RANK=rank, KB=max(16, triton.next_power_of_2(width)),
            RB=min(64, max(16, triton.next_power_of_2(rank))), num_warps=4, **followed(),
        )  # fmt: skip
    return out, choice

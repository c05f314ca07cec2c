"""The ops of the model on a GPU against their references, and the bits of their rows.

On a machine without a GPU `tests/parity/test_gpu_interpreted.py` runs this file under Triton's interpreter, in float32:
bfloat16 products are wrong there.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu import (
    absorb,
    add_rmsnorm,
    draft_block,
    int4_moe,
    linear,
    linear_activated,
    linear_held,
    linear_normed,
    rope,
    route_silu,
    router,
    row_attention,
    row_layout,
    silu_mul,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TYPE = torch.float32 if INTERPRETED else torch.bfloat16
EXACT = 2e-5 if INTERPRETED else 1e-2  # of the largest value: a bfloat16 has 8 bits
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def rand(*shape: int, dtype: torch.dtype = TYPE) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def whole(*shape: int, low: int = 0, high: int = 2) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, generator=draw, dtype=torch.int32).to(DEVICE)


def poison(*shape: int, dtype: torch.dtype = TYPE) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def same(got: torch.Tensor, expected: torch.Tensor, why: str) -> None:
    """Equal bits; under the interpreter, whose products are NumPy's and depend on the row count, nearly."""
    if INTERPRETED:
        close(got, expected)
    else:
        assert torch.equal(got, expected), why


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = EXACT) -> None:
    assert got.shape == expected.shape
    assert float((got.float() - expected.float()).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(("rows", "heads", "n", "k"), linear.TEST_SHAPES)
def test_linear(rows: int, heads: int, n: int, k: int) -> None:
    x, w = rand(rows, heads, k), rand(heads, n, k)
    out = poison(rows, heads, n, dtype=torch.float32)
    close(linear.linear(x, w, out), linear.reference(x, w))
    one = poison(1, heads, n, dtype=torch.float32)
    same(linear.linear(x[-1:], w, one)[0], out[-1], "a row alone has other bits")
    same(linear.linear(x, w, torch.empty_like(out), tile=64), out, "a tile of 64 rows has other bits")
    picked = torch.tensor([rows - 1, 0], dtype=torch.int32, device=DEVICE)
    got = linear.linear(x, w, poison(2, heads, n, dtype=torch.float32), picked)
    same(got, out[picked.long()], "a picked row has other bits")


def test_linear_fills_a_part_of_wider_rows() -> None:
    x, w, out = rand(5, 4, 16), rand(4, 32, 16), poison(5, 4, 48)
    linear.linear(x, w, out[..., :32])
    close(out[..., :32], linear.reference(x, w))
    assert out[..., 32:].isnan().all()


@pytest.mark.parametrize("fault", ["w", "x", "out", "rows"])
def test_linear_refuses_by_name(fault: str) -> None:
    good = {"x": rand(5, 64), "w": rand(32, 64), "out": poison(5, 32), "rows": None}
    bad = {"w": rand(64, 32).T, "x": rand(64, 5).T, "out": poison(32, 5).T, "rows": torch.zeros(4, dtype=torch.int32)}
    with pytest.raises(ValueError, match=f"^{fault} "):
        linear.linear(**{**good, fault: bad[fault]})  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "hidden", "slots"), add_rmsnorm.TEST_SHAPES)
def test_add_rmsnorm(rows: int, hidden: int, slots: int) -> None:
    x, w, delta = rand(rows, hidden, dtype=torch.float32), rand(hidden), rand(rows, hidden)
    partials = rand(rows, slots, hidden, dtype=torch.float32) if slots else None
    new, normed = add_rmsnorm.reference(x, w, 1e-5, delta, partials)
    out, taps = poison(rows, hidden), poison(rows, 2 * hidden, dtype=torch.float32)
    add_rmsnorm.add_rmsnorm(x, w, out, 1e-5, delta=delta, partials=partials, tap=taps[:, hidden:])
    close(x, new, 1e-6)
    close(out, normed)
    assert torch.equal(taps[:, hidden:], x)


def test_add_rmsnorm_begins_with_the_embedding() -> None:
    table, tokens, x, out = rand(7, 96), whole(3, high=7), poison(3, 96, dtype=torch.float32), poison(3, 96)
    add_rmsnorm.add_rmsnorm(x, rand(96), out, 1e-5, tokens=tokens, table=table)
    assert torch.equal(x, table[tokens.long()].float())
    close(out, add_rmsnorm.reference(x, rand(96), 1e-5, None, None)[1])


@pytest.mark.skipif(INTERPRETED, reason="of a card's shared memory")
@pytest.mark.parametrize(("n", "k"), linear_held.HELD)
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_weights_that_wait_in_shared_memory_give_the_same_bits(n: int, k: int, rows: int) -> None:
    heads, parts = 8 if max(n, k) == 512 else 1, linear.apart(rows, n, k)
    x, w = rand(rows, heads, k), rand(heads, n, k)
    held, plain = (poison(parts, rows, heads, n, dtype=torch.float32) for _ in range(2))
    linear_held.multiply_held(x, w, held, 0.5, linear_held.HELD[n, k], eager=True)
    linear.multiply(x, w, plain, scale=0.5, cut=linear.cut_of(rows, n, k, 200_000))
    same(held, plain, "held weights have other bits")


@pytest.mark.skipif(INTERPRETED, reason="of a card's shared memory")
@pytest.mark.parametrize(("n", "k"), linear_normed.NORMED)
@pytest.mark.parametrize("more", [False, True])
def test_a_product_that_norms_its_row_gives_the_same_bits(n: int, k: int, more: bool) -> None:
    x, norm, w = rand(1, k, dtype=torch.float32), rand(k), rand(n, k)
    delta = x.roll(1000, 1)
    into, taps, kept = poison(1, k, dtype=torch.float32), poison(1, 3 * k, dtype=torch.float32), poison(1, k)
    rooms = [poison(8 * n, dtype=torch.float32) for _ in range(2)]
    given = {"kept": kept, "tap": taps[:, k : 2 * k]} if more else {}
    got = linear_normed.linear_parts_normed(x, delta, norm, w, rooms[0], into, 1e-5, **given)
    normed, before = poison(1, k), x.clone()
    add_rmsnorm.add_rmsnorm(x, norm, normed, 1e-5, delta=delta)
    same(got, linear.linear_parts(normed, w, rooms[1]), "a normed row has other bits")
    same(into, x, "the stream has other bits")
    if more:
        same(kept, normed, "the norm has other bits")
        same(taps[:, k : 2 * k], x, "features have other bits")
        assert taps[:, :k].isnan().all()
        assert taps[:, 2 * k :].isnan().all()
    with pytest.raises(ValueError, match="into is x"):
        linear_normed.linear_parts_normed(before, delta, norm, w, rooms[0], before, 1e-5)


@pytest.mark.skipif(INTERPRETED, reason="of a card's shared memory")
@pytest.mark.parametrize("early", [False, True])
def test_a_product_that_activates_its_row_gives_the_same_bits(early: bool) -> None:
    parts, w, act = rand(8, 1, 896, dtype=torch.float32), rand(7168, 256), poison(1, 256)
    got, expected = (poison(1, 7168, dtype=torch.float32) for _ in range(2))
    linear_activated.multiply_activated(parts, w, got, early)
    silu_mul.silu_mul(parts, act)
    same(got, linear.linear(act, w, expected), "an activated row has other bits")


@pytest.mark.parametrize("rows", [1, 65] if INTERPRETED else [1, 5, 16, 64, 65, 130, 300])
def test_parts_of_a_product_are_added_to_its_bits(rows: int) -> None:
    x, w = rand(rows, 4096), rand(40, 4096)
    whole = linear.linear(x, w, poison(rows, 40, dtype=torch.float32))
    room = poison(linear.room_of_parts(rows, 40, 4096), dtype=torch.float32)
    parts = linear.linear_parts(x, w, room)
    assert parts.shape == (8 if rows <= 64 else 1, rows, 40)
    summed = parts[0].clone()
    for part in parts[1:]:
        summed += part
    same(summed, whole, "parts have other bits")
    same(linear.linear(x[-1:], w, poison(1, 40, dtype=torch.float32))[0], whole[-1], "a row alone has other bits")
    with pytest.raises(ValueError, match="room is 39"):
        linear.linear_parts(x, w, room[:39])


@pytest.mark.parametrize("parts", [1, 8])
def test_consumers_add_parts_in_order(parts: int) -> None:
    """As if they had been added before: to the bit."""
    a = rand(parts, 5, 2 * 96 + 24, dtype=torch.float32)
    whole = a[0].clone()
    for part in a[1:]:
        whole += part
    out, expected = poison(5, 96), poison(5, 96)
    silu_mul.silu_mul(a, out)
    silu_mul.silu_mul(whole, expected)
    assert torch.equal(out, expected)
    slots = torch.tensor([5, -1, 2, 63, 7], dtype=torch.int32, device=DEVICE)
    routed = []
    for given in (a, whole):
        chosen, weights = torch.full((5, 3), -2, dtype=torch.int32, device=DEVICE), poison(5, 3, dtype=torch.float32)
        router.route(given[..., 192:], rand(24, dtype=torch.float32), slots, chosen, weights, True, 2.5)
        routed.append((chosen, weights))
    assert torch.equal(routed[0][0], routed[1][0])
    assert torch.equal(routed[0][1], routed[1][1])
    norms, angle = (rand(168), rand(32)), rand(50, 8, dtype=torch.float32)
    position = torch.randint(0, 50, (5,), dtype=torch.int32).to(DEVICE)
    slot = torch.tensor([5, -1, 2, 63, 7], dtype=torch.int32, device=DEVICE)
    found = []
    for given in (a, whole):
        cache, latent = torch.zeros(64, 48, dtype=TYPE, device=DEVICE), poison(5, 168)
        rope.mla_inputs(given, *norms, 1e-5, position, slot, angle.cos(), angle.sin(), cache, latent)
        found.append((cache, latent))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(("rows", "width", "behind"), silu_mul.TEST_SHAPES)
def test_silu_mul(rows: int, width: int, behind: int) -> None:
    a, out = rand(rows, 2 * width + behind, dtype=torch.float32), poison(rows, width)
    silu_mul.silu_mul(a, out)
    close(out, silu_mul.reference(a, width))


@pytest.mark.parametrize(("rows", "experts", "top_k"), router.TEST_SHAPES)
def test_routing_with_an_activation_beside_it_has_the_bits_of_both(rows: int, experts: int, top_k: int) -> None:
    parts, bias = rand(3, rows, 600 + experts, dtype=torch.float32), rand(experts, dtype=torch.float32)
    slot, found = whole(rows, high=5), []
    for together in (True, False):
        chosen, act = torch.zeros(rows, top_k, dtype=torch.int32, device=DEVICE), poison(rows, 300)
        weights = poison(rows, top_k, dtype=torch.float32)
        given = parts[..., 600:], bias, slot, chosen, weights, True, 2.5
        if together:
            route_silu.route_silu(*given, parts, act)
        else:
            router.route(*given)
            silu_mul.silu_mul(parts, act)
        found.append((chosen, weights, act))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("rows", "heads", "n", "k", "width"), absorb.TEST_SHAPES)
def test_absorb(rows: int, heads: int, n: int, k: int, width: int) -> None:
    query, w, out = rand(rows, heads, k + width), rand(heads, n, k), poison(rows, heads, n + width)
    position, angle = whole(rows, high=100), rand(100, width // 2, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    absorb.absorb(query, w, position, cos, sin, out, 0.25)
    close(out[..., :n], 0.25 * linear.reference(query[..., :k], w))
    close(out[..., n:], 0.25 * rope.reference(query[..., k:], position, cos, sin))
    product = linear.linear(query[..., :k], w, poison(rows, heads, n), scale=0.25)
    same(out[..., :n], product, "a product by itself has other bits")
    alone = absorb.absorb(query[-1:].clone(), w, position[-1:].clone(), cos, sin, poison(1, heads, n + width), 0.25)
    same(alone[0], out[-1], "a row alone has other bits")


def test_mla_inputs_leaves_padding_and_other_slots_alone() -> None:
    q, latent, turned = 96, 32, 16
    a, q_norm, kv_norm = rand(4, q + latent + turned, dtype=torch.float32), rand(q), rand(latent)
    angle = rand(50, turned // 2, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    position, slot = whole(4, high=50), torch.tensor([5, -1, 2, 63], dtype=torch.int32, device=DEVICE)
    cache, out = poison(64, latent + turned), poison(4, q)
    rope.mla_inputs(a, q_norm, kv_norm, 1e-5, position, slot, cos, sin, cache, out)
    keys, query = rope.mla_inputs_reference(a, q_norm, kv_norm, 1e-5, position, cos, sin)
    close(out, query)
    close(cache[[5, 2, 63]], keys[[0, 2, 3]])
    assert int(cache.isnan().sum()) == 61 * (latent + turned)


@pytest.mark.parametrize(("rows", "experts", "top_k"), router.TEST_SHAPES)
@pytest.mark.parametrize("normalise", [True, False])
def test_route(rows: int, experts: int, top_k: int, normalise: bool) -> None:
    logits, bias = rand(rows, experts + 3, dtype=torch.float32), rand(experts, dtype=torch.float32)
    chosen = torch.zeros(rows, top_k, dtype=torch.int32, device=DEVICE)
    weights, slot = poison(rows, top_k, dtype=torch.float32), whole(rows, high=5)
    router.route(logits, bias, slot, chosen, weights, normalise, 2.5)
    expected, expected_weights = router.reference(logits, bias, top_k, normalise, 2.5)
    assert torch.equal(chosen.long(), expected)
    close(weights, expected_weights, 1e-5)


def test_route_takes_the_lowest_id_of_equals_and_no_padding() -> None:
    logits = torch.zeros(2, 8, device=DEVICE)
    chosen = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    slot = torch.tensor([0, -1], dtype=torch.int32, device=DEVICE)
    router.route(logits, logits[0], slot, chosen, poison(2, 4, dtype=torch.float32), True, 1.0)
    assert chosen.tolist() == [[0, 1, 2, 3], [-1, -1, -1, -1]]


@pytest.mark.parametrize("rows", [1, 130])
def test_expert_lists(rows: int) -> None:
    rank = torch.rand(rows, 6, generator=torch.Generator().manual_seed(1))
    chosen = rank.argsort(-1)[:, :3].int().to(DEVICE)
    chosen[rows // 2 :: 7] = -1
    pairs = torch.zeros(6, rows, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    router.expert_lists(chosen, pairs, counts)
    expected = router.lists_reference(chosen, 6)
    assert [line[:n].tolist() for line, n in zip(pairs, counts.tolist(), strict=True)] == expected


@pytest.mark.parametrize(("rows", "hidden", "inner", "experts", "top_k"), int4_moe.TEST_SHAPES)
def test_int4_moe(rows: int, hidden: int, inner: int, experts: int, top_k: int) -> None:
    def words(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        nibbles = whole(experts, n, k // 8, low=-(2**31), high=2**31 - 1)
        return nibbles, (rand(experts, n, k // 32).abs() * 0.2).contiguous()

    x, gate_up, down = rand(rows, hidden), words(2 * inner, hidden), words(hidden, inner)
    rank = torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows))
    chosen = rank.argsort(-1)[:, :top_k].int().to(DEVICE)
    if rows > 1:
        chosen[1] = -1  # padding
    weights = rand(rows, top_k, dtype=torch.float32)

    def run(some: slice) -> torch.Tensor:
        part = chosen[some].contiguous()
        count = len(part)
        pairs = torch.zeros(experts, count, dtype=torch.int32, device=DEVICE)
        counts = torch.zeros(experts, dtype=torch.int32, device=DEVICE)
        router.expert_lists(part, pairs, counts)
        partials = poison(count, top_k, hidden, dtype=torch.float32)
        room = poison(count * top_k, inner)
        int4_moe.int4_moe(x[some], weights[some].contiguous(), pairs, counts, gate_up, down, room, partials)
        return partials

    got = run(slice(None))
    real = chosen[:, 0] >= 0
    expected = int4_moe.reference(x, chosen, weights, gate_up, down)
    close(got[real], expected[real])
    assert got[~real].isnan().all(), "padding was computed"
    same(run(slice(rows - 1, rows))[0], got[-1], "a row alone has other bits")


PARENTS = {0: [-1, 0, 0, 1, 1, 3, 5, 2, 6], 1: [-1], 2: [-1, 0, 1, 2]}  # a tree, a plain row, a chain
PREFIX = {0: 60, 1: 0, 2: 127}


def laid_out() -> dict[str, torch.Tensor]:
    """Three sequences and two rows of padding: inputs and outputs of `row_layout`."""
    parents = [p for q in PARENTS for p in PARENTS[q]] + [-1, -1]
    seq = [q for q in PARENTS for _ in PARENTS[q]] + [-1, -1]
    pages = [[3, 1, 0], [2, 9, 9], [4, 5, 6]]
    numbers = {
        "parents": parents, "seq": seq, "first": [0, 9, 10], "prefix": list(PREFIX.values()), "chain": [0, 1, 1],
        "pages": pages, "position": [0] * 16, "slot": [0] * 16, "shared": [0] * 16, "path": [[0] * 64] * 16,
    }  # fmt: skip
    tensors = {name: torch.tensor(value, dtype=torch.int32, device=DEVICE) for name, value in numbers.items()}
    row_layout.row_layout(**tensors)
    return tensors


def test_row_layout() -> None:
    t = laid_out()
    given = [t[name].tolist() for name in ("parents", "seq", "first", "prefix", "chain", "pages")]
    for r, (position, slot, shared, path) in enumerate(row_layout.reference(*given)):
        assert (int(t["position"][r]), int(t["slot"][r]), int(t["shared"][r])) == (position, slot, shared)
        assert t["path"][r, : len(path)].tolist() == path


@pytest.mark.parametrize(("heads", "latent", "turned"), row_attention.TEST_SHAPES)
def test_row_attention(heads: int, latent: int, turned: int) -> None:
    t = laid_out()
    q, cache = rand(16, heads, latent + turned), poison(8 * 64, latent + turned)
    given = [t[name].tolist() for name in ("parents", "seq", "first", "prefix", "chain", "pages")]
    rows = row_layout.reference(*given)
    written = [slot for _, slot, _, _ in rows if slot >= 0]
    places = [[page * 64 + i for page in pages for i in range(64)] for pages in t["pages"].tolist()]
    for of, pages in enumerate(places):
        written += pages[: PREFIX[of]]
    cache[written] = rand(len(written), latent + turned)  # whatever else is read is NaN
    out = poison(16, heads, latent)
    where = [t[name] for name in ("position", "shared", "seq", "pages", "path")]
    row_attention.row_attention(q, cache, *where, out, 0.2)
    for r, (position, _, shared, path) in enumerate(rows):
        of = int(t["seq"][r])
        if of < 0:
            assert not out[r].any()
            continue
        slots = [*places[of][:shared], *path][: position + 1]
        close(out[r], row_attention.reference(q[r], cache[slots], latent, 0.2))


@pytest.mark.parametrize(("count", "heads", "groups", "width", "block"), draft_block.TEST_SHAPES)
@pytest.mark.parametrize(("window", "causal"), [(None, False), (20, True), (100, True)])
def test_draft_block(
    count: int, heads: int, groups: int, width: int, block: int, window: int | None, causal: bool
) -> None:
    rows = count * block
    a, norms = rand(rows, (heads + 2 * groups) * width, dtype=torch.float32), rand(heads + groups, width)
    angle = rand(400, width // 2, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    starts, ends, anchors = [0, 70, 5][:count], [3, 200, 5][:count], [3, 210, 5][:count]
    position = torch.tensor([p + i for p in anchors for i in range(block)], dtype=torch.int32, device=DEVICE)
    q, own = poison(rows, heads, width), poison(rows, 2, groups, width)
    every = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    draft_block.draft_rows(a, norms, 1e-5, position, every, cos, sin, q, own)
    expected_q, expected_own = draft_block.rows_reference(a, norms, heads, position, cos, sin, 1e-5)
    close(q, expected_q)
    close(own, expected_own)

    pool, pages = poison(8 * 64, 2, groups, width), torch.tensor([[6, 0, 0], [3, 1, 5], [0, 0, 0]][:count])
    contexts = []
    for of, (start, end) in enumerate(zip(starts, ends, strict=True)):
        slots = [int(pages[of, p // 64 - start // 64]) * 64 + p % 64 for p in range(start, end)]
        pool[slots] = rand(end - start, 2, groups, width)
        contexts.append(pool[slots])
    out = poison(rows, heads, width)
    where = [torch.tensor(value, dtype=torch.int32, device=DEVICE) for value in (starts, ends, anchors)]
    draft_block.draft_attention(q, own, pool, pages.int().to(DEVICE), *where, out, window, causal)
    for of, context in enumerate(contexts):
        part = slice(of * block, (of + 1) * block)
        given = (q[part].cpu(), own[part].cpu(), context.cpu(), starts[of], anchors[of], window or 0, causal)
        close(out[part].cpu(), draft_block.attention_reference(*given))


def test_draft_rows_of_a_context() -> None:
    a, norms, angle = rand(3, 2 * 2 * 16, dtype=torch.float32), rand(2, 16), rand(50, 8, dtype=torch.float32)
    position, slot = whole(3, high=50), torch.tensor([4, -1, 0], dtype=torch.int32, device=DEVICE)
    kv = poison(6, 2, 2, 16)
    draft_block.draft_rows(a, norms, 1e-5, position, slot, angle.cos(), angle.sin(), None, kv)
    expected = draft_block.rows_reference(a, norms, 0, position, angle.cos(), angle.sin(), 1e-5)[1]
    close(kv[[4, 0]], expected[[0, 2]])
    assert int(kv.isnan().sum()) == 4 * 2 * 2 * 16

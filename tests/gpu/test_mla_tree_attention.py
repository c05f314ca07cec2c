"""Path D's attention on a GPU: against the reference, and bit for bit against itself in every other arrangement."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.gpu.absorb import absorb
from kernels.gpu.cuda import kernel
from kernels.gpu.mla_reference import tree_attention_reference
from kernels.gpu.mla_tree_attention import MOST_ROWS, Workspace, mla_tree_attention, most_splits, split_width
from kernels.gpu.mla_wide_cuda import SHARED, THREADS
from tests.gpu.attention_cases import FORMS, NARROW, WIDE, Batch, attend, batch, decoded, ints, one, same, signed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAMES = [f"{form.lines}x{form.stages}{' gluon' * form.gluon}" for form in FORMS]
# prefixes, rows: the ugly ones first
SHAPES = [
    ([0], [1]),
    ([0], [64]),
    ([1], [2]),
    ([63], [1]),
    ([63], [2]),
    ([64], [64]),
    ([65], [33]),
    ([127], [2]),
    ([1000, 0, 64], [16, 1, 7]),
    ([4000, 63, 1, 128], [1, 64, 2, 16]),
    ([700, 5000, 0, 65, 2, 64, 63, 1], [16, 8, 0, 1, 0, 3, 64, 5]),
]


def close(got: torch.Tensor, b: Batch) -> None:
    expected = tree_attention_reference(
        b.q.nan_to_num(), b.cache, b.page_table, b.prefix_lens, b.row_start, b.ancestors, b.latent
    )
    assert torch.isfinite(got).all()
    error = (got.float() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < 4e-3, float(error)  # bf16 has 8 bits


@pytest.mark.skipif(
    torch.cuda.get_device_capability()[0] != 9 if torch.cuda.is_available() else True, reason="Hopper's"
)
def test_the_wide_form_is_in_cuda() -> None:
    """Or the tests below would hold Gluon to itself."""
    assert kernel("mla_prefix_wide", torch.cuda.current_device(), THREADS, SHARED)


@pytest.mark.parametrize("columns", [64, 0], ids=["cut", "whole"])
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_every_form_computes_the_reference(form, columns) -> None:
    for n, (prefixes, counts) in enumerate(SHAPES):
        b = batch(prefixes, counts, seed=n, padding=n % 3)
        got = attend(b, form._replace(columns=columns))
        close(got, b)
        assert not got[b.starts[-1] :].any()  # padding


@pytest.mark.parametrize("heads", [1, 4, 8, 12, 16, 64])
def test_any_number_of_heads(heads) -> None:
    b = batch([300, 65], [9, 2], heads=heads, seed=heads)
    for form in FORMS:
        close(attend(b, form), b)


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_the_bundled_models_widths(form) -> None:
    for n, (prefixes, counts) in enumerate(SHAPES):
        b = batch(prefixes, counts, latent=128, rope=32, seed=n, padding=1)
        whole = attend(b, form._replace(columns=0))
        close(whole, b)
        assert same(whole, attend(b, form))


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (128, 32)])
def test_all_forms_have_the_same_bits(latent, rope) -> None:
    """One session may be served by any of them, step by step, as its batch grows and shrinks."""
    differ = 0
    for n, (prefixes, counts) in enumerate(SHAPES):
        b = batch(prefixes, counts, latent=latent, rope=rope, width=[64, 128, 256, 1024][n % 4], seed=n)
        expected = attend(b, NARROW, splits=128)
        for form in FORMS:
            for programs in (1, 5, 132):
                for columns in (64, 0):
                    got = attend(b, form._replace(programs=programs, columns=columns), splits=128)
                    differ += int((got != expected).sum())
    assert differ == 0


@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize(
    ("prefix", "rows", "width"),
    [
        (0, 64, 64),
        (0, 16, 128),
        (63, 64, 128),
        (498, 64, 512),
        (1000, 16, 256),
        (1023, 64, 128),
        (8190, 64, 512),
        (8100, 64, 64),
    ],
)
def test_a_row_in_a_tree_has_the_bits_of_plain_decoding(kind, prefix, rows, width) -> None:
    b = batch([prefix], [rows], kind=kind, width=width, seed=prefix + rows)
    tree, plain = attend(b, WIDE, splits=128), decoded(b, 0)
    assert same(attend(plain, NARROW, splits=128), tree)
    for row in (0, rows // 2, rows - 1):  # one sequence of one row alone
        assert same(attend(one(plain, row), splits=128)[0], tree[row])


@pytest.mark.parametrize(("latent", "rope"), [(128, 32)])
def test_plain_decoding_at_the_bundled_models_widths(latent, rope) -> None:
    for prefix in (0, 61, 500, 2000):
        b = batch([prefix], [64], latent=latent, rope=rope, seed=prefix)
        assert same(attend(decoded(b, 0)), attend(b))


def test_a_sequence_alone_has_the_bits_of_any_batch() -> None:
    prefixes, counts = [700, 5000, 0, 65, 2, 64, 63, 1], [16, 8, 64, 1, 33, 3, 64, 5]
    b = batch(prefixes, counts, width=[64, 512, 128, 128, 64, 64, 256, 128], padding=5, seed=3)
    together = attend(b, splits=128)
    for n in range(len(prefixes)):
        assert same(attend(one(b, n), splits=128), together[b.starts[n] : b.starts[n + 1]])


@pytest.mark.parametrize("limit", [66_000, 132_096])
def test_a_long_session_of_more_than_64_splits(limit) -> None:
    """Rows on both sides of a split's end: in a tree, in every form and cut, beside others, alone as plain decoding."""
    width, splits = split_width(limit), most_splits(limit)
    border = (limit + MOST_ROWS) // width * width
    b = batch([border - 3, 700], [5, 9], kind="random", width=[width, 128], seed=limit)
    assert 64 <= border // width < splits
    together = attend(b, NARROW, splits)
    close(together, b)
    long = one(b, 0)
    for form in FORMS:
        for programs, columns in ((1, 64), (132, 64), (132, 0)):
            cut = form._replace(programs=programs, columns=columns)
            assert same(attend(long, cut, splits), together[:5])
    plain = decoded(b, 0)
    assert same(attend(plain, splits=splits), together[:5])
    for row in range(5):
        assert same(attend(one(plain, row), splits=splits)[0], together[row])


def test_sixty_four_sequences_of_one_row() -> None:
    b = batch([n * 37 for n in range(64)], [1] * 64, seed=9)
    close(attend(b), b)


def test_page_numbers_past_two_to_the_31_elements() -> None:
    b = batch([1000, 65], [16, 3], seed=4)
    pages = 2**31 // (64 * 576) + 300
    far = torch.empty(pages, 64, 576, dtype=torch.bfloat16, device="cuda")
    far[-len(b.cache) :] = b.cache
    moved = replace(b, cache=far, page_table=b.page_table + (pages - len(b.cache)))
    for form in FORMS:
        assert same(attend(moved, form), attend(b, form))


def test_a_row_without_ancestors_sees_the_prefix_only() -> None:
    b = batch([0, 128, 70], [2, 2, 2], seed=5)
    b = replace(b, ancestors=signed([0, 1, 0, 1, 0, 1]))
    got = attend(b)
    assert not got[0].any()
    close(got, b)


def test_more_splits_than_the_workspace_holds_come_out_as_nan() -> None:
    b = batch([1000, 100], [3, 3], width=64, seed=6)
    for form in FORMS:
        got = attend(b, form, splits=32)
        assert same(got, attend(b, form, splits=64))
    b = batch([3000, 100], [3, 3], width=64, seed=6)
    got = attend(b, splits=32)
    assert got[:3].isnan().all()
    assert same(got[3:], attend(b, splits=64)[3:])


def test_a_graph_reads_lengths_trees_and_rows_on_the_device() -> None:
    big, small = batch([900, 300], [20, 12], seed=7), batch([0, 77], [9, 23], kind="chain", seed=8)
    table = torch.zeros_like(big.page_table)
    table[:, : small.page_table.shape[1]] = small.page_table + len(big.cache)
    cache = torch.cat([big.cache, small.cache])
    small = replace(small, cache=cache, page_table=table)
    held = replace(big, cache=cache, **{name: getattr(big, name).clone() for name in LIVE})
    out = torch.empty(32, 8, 512, dtype=torch.bfloat16, device="cuda")
    workspace = Workspace(32, 8, 512, 64)

    def call() -> None:
        mla_tree_attention(
            held.q,
            held.cache,
            held.page_table,
            held.prefix_lens,
            held.row_start,
            held.ancestors,
            held.widths,
            out,
            workspace,
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        call()
    for now in (small, replace(big, cache=cache), small):
        for name in LIVE:
            getattr(held, name).copy_(getattr(now, name))
        out.fill_(float("nan"))
        graph.replay()
        assert same(out, attend(now))


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_what_is_read_before_the_launch_before_has_ended(form) -> None:
    """Each call's queries are written by the launch right before it, of a graph in which launches follow closely."""
    b = batch([4000, 63, 700], [3, 16, 5], seed=13)
    rows, heads, nope, turns = len(b.q), 8, 128, 40
    random = torch.Generator("cuda").manual_seed(13)
    query = torch.randn(turns, rows, heads, nope + 64, device="cuda", generator=random).bfloat16()
    w = torch.randn(heads, 512, nope, device="cuda", generator=random).bfloat16() / 16
    position = torch.arange(rows, dtype=torch.int32, device="cuda")
    cos, sin = (torch.randn(rows, 32, device="cuda", generator=random) for _ in range(2))
    workspace = Workspace(rows, heads, 512, 64)
    about = b.cache, b.page_table, b.prefix_lens, b.row_start, b.ancestors, b.widths

    def calls(early: bool) -> torch.Tensor:
        q, out = torch.zeros_like(b.q), b.q.new_zeros(turns, rows, heads, 512)

        def several() -> None:
            for turn in range(turns):
                absorb(query[turn], w, position, cos, sin, q, 0.05, early=True)
                mla_tree_attention(q, *about, out[turn], workspace, form, early)

        several()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            several()
        out.fill_(float("nan"))
        graph.replay()
        return out

    expected = calls(False)
    assert torch.isfinite(expected).all()
    assert same(calls(True), expected)


LIVE = ["q", "page_table", "prefix_lens", "row_start", "ancestors", "widths"]


def test_slots_that_no_row_sees_change_nothing() -> None:
    """The cases poison them with NaN; here with other numbers."""
    b = batch([100, 65], [4, 4], seed=10)
    filled = replace(b, cache=b.cache.nan_to_num(nan=3e4))
    for form in FORMS:
        assert same(attend(b, form), attend(filled, form))


def test_the_last_slot_of_a_full_table() -> None:
    b = batch([64 * 20 - 5], [5], kind="chain", seed=11)
    b = replace(b, page_table=b.page_table[:, :20].contiguous())
    for form in FORMS:
        close(attend(b, form), b)


def test_no_sequence_has_rows() -> None:
    b = batch([10, 20], [0, 0], padding=4, seed=12)
    b = replace(b, row_start=ints([0, 0, 0]))
    for form in FORMS:
        assert not attend(b, form).any()

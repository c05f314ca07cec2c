"""Which row law, and how many threads, keep a row's bits its own: a self-check at load, with the model's own shapes.

Libraries choose a kernel by the row count and split a product between threads where they like; either may change the
last bits. The reference is one thread and many rows. What is found goes into the kernel law's name, a part of the
fingerprint.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from hedgerow.model.blas import pinned
from hedgerow.model.config import K2Config
from kernels.linear import MIN_4, TILE_16, RowLaw, batched_linear, column_blocks, linear, pad_rows, wide_linear
from kernels.mla_tree_attention import PAGE
from kernels.rmsnorm import rmsnorm
from kernels.rope import rope_pairs
from kernels.swiglu import swiglu

log = logging.getLogger(__name__)
ROW_COUNTS = (*range(1, 18), 33)
MOST_ROWS = 64


class Product(NamedTuple):
    """A product that the model calls: `batch` matrices [k, n] side by side, or one `wide` one."""

    k: int
    n: int
    batch: int = 1
    wide: bool = False


class Choice(NamedTuple):
    """The law to follow and what to call it. `proven` is False where no law kept the rows equal."""

    law: RowLaw
    proven: bool

    @property
    def name(self) -> str:
        return self.law.name if self.proven else f"{self.law.name}-unproven"


def choose_row_law(products: Sequence[Product], widths: Sequence[int]) -> Choice:
    """Takes `MIN_4` where it holds at some thread count, else `TILE_16`; lowers torch's thread count to one that holds.

    `widths` are those of the row-wise ops. Changes the process's thread count, and says so in the log.
    """
    started, asked = time.perf_counter(), torch.get_num_threads()
    reasons: list[str] = []
    for law in (MIN_4, TILE_16):
        for threads in range(asked, 0, -1):
            fault = first_fault(law, threads, products, widths)
            if fault is None:
                report(law, threads, asked, reasons, time.perf_counter() - started)
                return Choice(law, True)
            reasons.append(f"{law.name} with {threads} threads: {fault}")
    torch.set_num_threads(asked)
    log.error("row law: none keeps a row's bits its own here: %s", "; ".join(reasons))
    return Choice(TILE_16, False)


def report(law: RowLaw, threads: int, asked: int, reasons: Sequence[str], seconds: float) -> None:
    torch.set_num_threads(threads)
    level = logging.WARNING if reasons else logging.INFO
    mode = pinned.get("MKL_CBWR", "not pinned")
    log.log(
        level,
        "row law %s, %d of %d threads, MKL_CBWR %s, checked in %.0f ms%s",
        law.name, threads, asked, mode, seconds * 1e3, f"; refused {'; '.join(reasons)}" if reasons else "",
    )  # fmt: skip


def first_fault(law: RowLaw, threads: int, products: Sequence[Product], widths: Sequence[int]) -> str | None:
    """What breaks `law` with `threads` threads, or None."""
    generator = torch.Generator().manual_seed(0)
    for product in products:
        x = torch.randn(product.batch, MOST_ROWS, product.k, generator=generator)
        w = torch.randn(product.batch, product.k, product.n, generator=generator)
        f = partial(multiply_wide, x[0], column_blocks(w[0]), law) if product.wide else partial(multiply, x, w, law)
        if not rows_equal(f, threads):
            return f"products {product.batch} x [rows, {product.k}] x [{product.k}, {product.n}]"
    for width in widths:
        x = torch.randn(MOST_ROWS, 2 * width, generator=generator)
        if not rows_equal(partial(row_wise, x), threads):
            return f"row-wise ops of width {width}"
    return None


def multiply(x: torch.Tensor, w: torch.Tensor, law: RowLaw, rows: int) -> torch.Tensor:
    """[rows, batch, n]: the first rows of x [batch, rows, k], padded as the law asks, times w [batch, k, n]."""
    padded = law.padded(rows)
    if len(x) == 1:
        return linear(pad_rows(x[0, :rows], padded), w[0], law)[:rows]
    return batched_linear(pad_rows(x[:, :rows], padded, 1), w, law).transpose(0, 1)[:rows]


def multiply_wide(x: torch.Tensor, w: torch.Tensor, law: RowLaw, rows: int) -> torch.Tensor:
    return wide_linear(pad_rows(x[:rows], law.padded(rows)), w, law)[:rows]


def row_wise(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Everything between the products, on the first rows of x [rows, 2 width]."""
    x = x[:rows]
    half = x.shape[1] // 2
    turned = rope_pairs(x[:, :half], torch.complex(x[:, : half // 2], x[:, half : half + half // 2]))
    return torch.cat([swiglu(x), x.sigmoid(), x.softmax(-1), rmsnorm(x, x.new_ones(1), 1e-5), turned], 1)


def rows_equal(f: Callable[[int], torch.Tensor], threads: int) -> bool:
    """Whether f(rows) with `threads` threads gives the first rows of f(MOST_ROWS) with one, for every row count."""
    with one_thread():
        whole = f(MOST_ROWS)
    torch.set_num_threads(threads)
    return all(torch.equal(f(rows), whole[:rows]) for rows in ROW_COUNTS)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def model_products(c: K2Config, ranks: int = 1) -> list[Product]:
    """The shapes that decide: every dense product of a rank, and attention with one page before the row's own."""
    heads, hidden, width = c.num_attention_heads // ranks, c.hidden_size, c.moe_intermediate_size // ranks
    shared = width * c.n_shared_experts
    return [
        Product(hidden, c.q_lora_rank + c.latent_width),
        Product(c.q_lora_rank, heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)),
        Product(c.qk_nope_head_dim, c.kv_lora_rank, heads),
        Product(c.latent_width, PAGE),
        Product(c.latent_width, 3 * PAGE),
        Product(PAGE, c.kv_lora_rank),
        Product(3 * PAGE, c.kv_lora_rank),
        Product(c.kv_lora_rank, c.v_head_dim, heads),
        Product(heads * c.v_head_dim, hidden),
        Product(hidden, 2 * shared + 32),
        Product(shared, hidden),
        Product(hidden, 2 * width),
        Product(width, hidden),
        Product(hidden, 2 * width, 4),
        Product(hidden, 2 * c.intermediate_size // ranks, wide=True),
        Product(hidden, min(1024, c.vocab_size // ranks), wide=True),
    ]

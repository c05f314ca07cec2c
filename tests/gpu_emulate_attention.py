"""Tree attention's portable form as compiled and carried out in NumPy, for the bundled model's widths: a row of a tree
against the reference, and against its own plain decoding, bit for bit: python -m tests.gpu_emulate_attention"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.gpu.mla_reference import tree_attention_reference
from kernels.gpu.mla_tree_attention import Plan, Workspace, launch
from tests.gpu_compile import kernel_of, launches
from tests.gpu_emulated import TYPES, Lanes, Program

HEADS, LATENT, ROPE, SPLITS = 2, 128, 32, 128
TYPES.update(u16=np.uint16, s16=np.int16, b8=np.uint8, u8=np.uint8)


class Attention(Program):
    """With what these two kernels have besides."""

    def get(self, name: str, kind: str) -> Lanes:
        if name.startswith("%r") and name not in self.registers:  # never written: any value does
            return np.zeros(self.threads, TYPES[kind])
        return super().get(name, kind)

    def step(self, guard: str | None, name: str, operands: list[str]) -> None:
        op, mask = name.split("."), None
        if guard:
            mask = self.registers[guard.lstrip("!")] ^ guard.startswith("!")
        if op[0] == "cp" and len(operands) < 2:
            return  # done at once
        if op[0] == "cp":
            self.ask(operands, np.ones(self.threads, bool) if mask is None else mask)
        elif op[0] in ("ldmatrix", "stmatrix"):
            self.matrix(op, operands)
        elif op[:3] == ["shfl", "sync", "idx"]:
            lane = np.arange(self.threads) // 32 * 32 + (self.get(operands[2], "u32") & 31)
            self.put(operands[0].split("|")[0], self.get(operands[1], "b32")[lane], mask)
        elif op[0] == "popc":
            bits = self.get(operands[1], "u64").view(np.uint8).reshape(-1, 8)
            self.put(operands[0], np.unpackbits(bits, axis=1).sum(1).astype(np.uint32), mask)
        elif name == "mov.b64" and operands[0].startswith("{"):
            whole = self.get(operands[1], "u64").view(np.uint32).reshape(-1, 2)
            for half, into in enumerate(part.strip() for part in operands[0].strip("{}").split(",")):
                self.put(into, whole[:, half].copy(), mask)
        elif name == "mov.b64" and operands[1].startswith("{"):
            halves = [self.get(part.strip(), "b32") for part in operands[1].strip("{}").split(",")]
            self.put(operands[0], np.stack(halves, 1).copy().view(np.uint64)[:, 0], mask)
        elif name == "mov.b32" and operands[1].startswith("{"):
            low, high = (self.get(part.strip(), "b16").astype(np.uint32) for part in operands[1].strip("{}").split(","))
            self.put(operands[0], low | (high << 16), mask)
        elif op[0] in ("rem", "div") and op[1] == "s32":
            one, other = (self.get(operand, "s32").astype(np.int64) for operand in operands[1:])
            whole = np.trunc(one / np.where(other == 0, 1, other)).astype(np.int64)
            made = whole if op[0] == "div" else one - whole * other
            self.put(operands[0], made.astype(np.int32), mask)
        elif op[0] == "shr":
            self.put(
                operands[0], self.get(operands[1], op[1]) >> self.get(operands[2], "u32").astype(TYPES[op[1]]), mask
            )
        else:
            super().step(guard, name, operands)

    def ask(self, operands: list[str], live: Lanes) -> None:
        """cp.async: where the size is 0, zeros; where the guard is off, nothing."""
        size = np.arange(int(operands[2], 0))
        full = (self.get(operands[3], "u32") > 0) if len(operands) > 3 else np.ones(self.threads, bool)
        source = np.where((full & live)[:, None], self.address(operands[1], "s64")[:, None] + size, 0)
        value = np.where(full[:, None], self.memory[source], 0)
        into = self.address(operands[0], "s32")[:, None] + size
        self.shared[into[live]] = value[live]

    def matrix(self, op: list[str], operands: list[str]) -> None:
        """Matrices of 8 x 8 halves, whose rows lanes 8 i .. 8 i + 7 point at; `trans`: a lane has two of a column."""
        registers, place = operands if op[0] == "ldmatrix" else operands[::-1]
        names = [name.strip() for name in registers.strip("{} ").split(",")]
        at, lane = self.address(place, "s32").reshape(-1, 4, 8), np.arange(32)
        for i, name in enumerate(names):
            parts = []
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                if "trans" in op:
                    row, column = column, row
                parts.append((at[:, i, row] + column * 2).reshape(-1))
            where = np.stack(parts, 1)[:, :, None] + np.arange(2)  # [lanes, halves, bytes]
            if op[0] == "ldmatrix":
                self.put(name, self.shared[where].reshape(-1, 4).copy().view(np.uint32)[:, 0], None)
            else:
                self.shared[where] = self.get(name, "b32").copy().view(np.uint8).reshape(-1, 2, 2)


class Case(NamedTuple):
    """One sequence: its keys in order, and its rows."""

    q: torch.Tensor  # [R, heads, width] bfloat16
    keys: torch.Tensor  # [prefix + R, width] bfloat16
    prefix: int
    masks: list[int]
    width: int  # of a split


@cache
def compiled(rows: int, columns: int) -> list[str]:
    """PTX of the prefix's kernel and of the merge, whose programs have so many columns."""
    about = [torch.zeros(*shape, dtype=torch.int32) for shape in ((1, 8), (1,), (2,), (1,))]
    return [kernel_of(one, 90).asm["ptx"] for one in launched(rows, columns, about)]


def launched(rows: int, columns: int, about: list[torch.Tensor]) -> list[Any]:
    q, out = (torch.zeros(rows, HEADS, width, dtype=torch.bfloat16) for width in (LATENT + ROPE, LATENT))
    cache, masks = torch.zeros(8, 64, LATENT + ROPE, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.int64)
    space = Workspace(rows, HEADS, LATENT, SPLITS, device="cpu")
    return launches(lambda: launch(q, cache, tuple(about), masks, out, space, Plan(16, 0, 4, columns)))


def numbers(tensor: torch.Tensor) -> Lanes:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16).copy()


def paged(case: Case) -> tuple[torch.Tensor, list[int]]:
    """Pages in any order; what holds no key is NaN."""
    count = len(case.keys) // 64 + 2
    cache = torch.full((count, 64, LATENT + ROPE), torch.nan, dtype=torch.bfloat16)
    pages = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
    for at, key in enumerate(case.keys):
        cache[pages[at // 64], at % 64] = key
    return cache, pages


def attend(case: Case, columns: int) -> torch.Tensor:
    """[R, heads, latent]: all programs of both kernels."""
    rows, (cache, pages) = len(case.q), paged(case)
    first, second = compiled(rows, columns)
    lines = rows * HEADS
    q, keys = numbers(case.q), numbers(cache)
    about = [np.array(one, np.int32) for one in (pages, [case.prefix], [0, rows], [case.width])]
    sums = np.full((lines, SPLITS, LATENT), 0x7FC0, np.uint16)
    states = [
        sums,
        *(np.full(shape, np.nan, np.float32) for shape in ((lines, SPLITS, 2), (lines, 64), (lines, LATENT))),
    ]
    for program in range(max(4, lines // 16 + 1)):
        Attention(first, q, keys, *about, *states, 1, 4, HEADS, len(pages), block=(program, 0))
    out, masks = np.full((rows, HEADS, LATENT), 0x7FC0, np.uint16), np.array(case.masks, np.uint64)
    for program in range(rows * (LATENT // columns)):
        Attention(second, q, keys, *about, masks, out, *states, 1, HEADS, len(pages), block=(program, 0))
    return torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)


def drawn(prefix: int, parents: list[int], width: int) -> Case:
    draw = torch.Generator().manual_seed(prefix)
    masks: list[int] = []
    for j, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << j)
    q = torch.randn(len(parents), HEADS, LATENT + ROPE, generator=draw) / 8
    keys = torch.randn(prefix + len(parents), LATENT + ROPE, generator=draw)
    return Case(q.bfloat16(), keys.bfloat16(), prefix, masks, width)


def alone(case: Case, row: int) -> Case:
    """The row as plain decoding: its path in order."""
    path = [j for j in range(64) if case.masks[row] >> j & 1]
    keys = torch.cat([case.keys[: case.prefix], case.keys[[case.prefix + j for j in path]]])
    return Case(case.q[row : row + 1], keys, len(keys) - 1, [1], case.width)


def compare(prefix: int, parents: list[int], width: int) -> None:
    case = drawn(prefix, parents, width)
    cache, pages = paged(case)
    expected = tree_attention_reference(
        case.q, cache, torch.tensor([pages], dtype=torch.int32), torch.tensor([prefix], dtype=torch.int32),
        torch.tensor([0, len(parents)], dtype=torch.int32), torch.tensor(case.masks), LATENT,
    )  # fmt: skip
    got = attend(case, 64)
    error = float((got.float() - expected).norm() / expected.norm())
    assert error < 4e-3, (prefix, error)
    for row in range(len(parents)):  # by the other cut of the merge
        one = attend(alone(case, row), LATENT)[0]
        assert torch.equal(one.view(torch.int16), got[row].view(torch.int16)), (prefix, row)


CASES = [  # prefix, parents, width of a split
    (130, [-1, 0, 0, 1, 2], 64), (62, [-1, 0, 1, 0, 3], 64), (0, [-1, 0, 0], 64),
    (190, [-1, 0, 1, 0], 128),  # a split that the rows go on with, and leave
    (66 * 64 - 1, [-1, 0, 0], 64),  # more than 64 splits, and a row behind the border of the next
]  # fmt: skip


if __name__ == "__main__":
    for given in CASES:
        compare(*given)
    print(f"{len(CASES)} trees")

"""Sums of groups side by side are those of groups one after another: both texts are run on names instead of numbers."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from kernels.gpu import moe_chain, moe_fragments


class Run:
    """A text's instructions. A value is a number: one for each instruction with its operands' values."""

    known: dict[tuple[object, ...], int]

    def __init__(self) -> None:
        self.known = {}

    def value(self, *key: object) -> int:
        return self.known.setdefault(key, len(self.known))

    def text(self, code: str, outputs: int, inputs: list[int]) -> list[int]:
        held = {f"${outputs + i}": value for i, value in enumerate(inputs)}
        for line in code.replace("\n", " ").strip("{} ").split(";"):
            line = line.strip(" }")
            if not line or line.startswith((".reg", "{ .reg", "bar.warp.sync")):
                continue
            name, rest = line.split(None, 1)
            groups = re.findall(r"\{([^}]*)\}|([^,{}\s]+)", rest)
            operands = [(inner or one).split(",") for inner, one in groups]
            read = [tuple(held.get(one.strip(), one.strip()) for one in operand) for operand in operands[1:]]
            for i, target in enumerate(operands[0]):
                held[target.strip()] = self.value(name, i, *read)
        return [held[f"${i}"] for i in range(outputs)]


def operands(run: Run, slabs: int, groups: int) -> tuple[list[int], list[int], list[int], int, list[int]]:
    def some(what: str, n: int) -> list[int]:
        return [run.value(what, i) for i in range(n)]

    count = slabs * groups
    return (
        some("word", 2 * count),
        some("scale", count),
        some("x", 4 * groups),
        run.value("-24"),
        some("acc", 4 * slabs),
    )


@pytest.mark.parametrize("slabs", [1, 4])
def test_the_same_instructions_on_the_same_values(slabs: int) -> None:
    run, groups = Run(), moe_chain.SUMS[slabs] // slabs
    words, scales, x, minus, acc = operands(run, slabs, groups)
    code = {1: moe_chain.ONE, 4: moe_chain.FOUR}[slabs].value
    got = run.text(code, 4 * slabs, [*words, *scales, *x, minus, *acc])
    assert len(
        {1: moe_chain.ONE_OPERANDS, 4: moe_chain.FOUR_OPERANDS}[slabs].value.split(",")
    ) == 8 * slabs + 3 * slabs * groups + 1 + len(x)
    for slab in range(slabs):
        expected = acc[4 * slab : 4 * slab + 4]
        for g in range(groups):
            k, b = slab * groups + g, x[4 * g : 4 * g + 4]
            begin = run.text(moe_fragments.OFFSET.value, 4, [*b, minus])
            taken = [words[2 * k], words[2 * k + 1], scales[k], *b, *begin, *expected]
            expected = run.text(moe_fragments.GROUP_1.value, 4, taken)
        assert got[4 * slab : 4 * slab + 4] == expected, slab

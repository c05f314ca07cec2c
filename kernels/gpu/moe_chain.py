"""Four or eight sums of groups under way together, for warps that cannot hide an MMA's latency behind other warps.

The arithmetic is `offset`'s and `group`'s (moe_fragments.py). But where those stand one behind the other, the assembler
lets each of a sum's MMAs wait for the one before it. Here the first MMAs of all sums stand side by side, then the
second ones; a warp's barrier keeps them so. At the end the sums are scaled and added, a slab's in its groups' order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gpu.moe_fragments import MMA, fragment, of_group

# By slabs. At one row, programs of three launches must fit side by side, or weights are asked for late: with eight sums
# a program has 119 registers, with four 80, and a layer takes 12.1 us in place of 15.7.
SUMS = {1: 4, 4: 8}
SYNC = "bar.warp.sync 0xffffffff;\n"  # neither loads nor MMAs pass it


def _code(slabs: int) -> str:
    """acc = fma(group's sum, scale, acc): outputs acc, 4 a slab; inputs two words a sum (slab, group, two), a scale
    (slab, group), x of the groups, -24, acc."""
    count = SUMS[slabs]
    groups = count // slabs
    word = 4 * slabs
    scale, x = word + 2 * count, word + 3 * count
    minus = x + 4 * groups
    text = f"{{ .reg .b32 t,s,a<8>; .reg .f32 z,c<{4 * groups}>,d<{4 * count}>; mov.f32 z,0f00000000;\n"
    begin = ["{" + ",".join(f"c{4 * g + j}" for j in range(4)) + "}" for g in range(groups)]
    sums = ["{" + ",".join(f"d{4 * k + j}" for j in range(4)) + "}" for k in range(count)]
    b = [[f"{{${x + 4 * g + 2 * half},${x + 4 * g + 2 * half + 1}}}" for half in range(2)] for g in range(groups)]
    for half in range(2):
        text += SYNC
        for g in range(groups):
            constant = "{" + ",".join([f"${minus}"] * 4) + "}"
            text += f"{MMA}{begin[g]},{constant},{b[g][half]},{begin[g] if half else '{z,z,z,z}'};\n"
    for half in range(2):
        text += SYNC
        for k in range(count):
            g = k % groups
            text += fragment(f"${word + 2 * k + half}", 0)
            text += f"{MMA}{sums[k]},{{a0,a1,a2,a3}},{b[g][half]},{sums[k] if half else begin[g]};\n"
    text += SYNC
    for k in range(count):
        r, g = divmod(k, groups)
        for j in range(4):
            if j % 2 == 0:
                text += f"shl.b32 s,${scale + k},16;\n" if j == 0 else f"and.b32 s,${scale + k},0xffff0000;\n"
            before = f"${4 * r + j}" if g else f"${minus + 1 + 4 * r + j}"
            text += f"fma.rn.f32 ${4 * r + j},d{4 * k + j},s,{before};\n"
    return text + "}"


def _operands(slabs: int) -> str:
    count = SUMS[slabs]
    return ",".join(["=&f"] * 4 * slabs + ["r"] * (3 * count + 4 * count // slabs + 1) + ["f"] * 4 * slabs)


ONE, ONE_OPERANDS = gl.constexpr(_code(1)), gl.constexpr(_operands(1))
FOUR, FOUR_OPERANDS = gl.constexpr(_code(4)), gl.constexpr(_operands(4))


@gluon.jit
def taken(values, first: gl.constexpr, n: gl.constexpr):
    """n values from `first` on, a multiple of four."""
    four = values[first], values[first + 1], values[first + 2], values[first + 3]
    if n == 4:
        return four
    else:  # noqa: RET505  to Gluon, code behind a `return` is code
        return four + taken(values, first + 4, n - 4)


@gluon.jit
def all_warps(values, first: gl.constexpr, n: gl.constexpr):
    """n values from `first` on, [32] each, in every warp."""
    four = of_group(values, first // 4)
    if n == 4:
        return four
    else:  # noqa: RET505
        return four + all_warps(values, first + 4, n - 4)


@gluon.jit
def chain(w, s, x, k24, acc, i: gl.constexpr, SLABS: gl.constexpr):
    """acc with the i-th sums of a step: of one slab four groups, of four slabs two."""
    n: gl.constexpr = 4 if SLABS == 1 else 8
    x_n: gl.constexpr = 4 * n // SLABS
    operands = taken(w, 2 * n * i, 2 * n) + taken(s, n * i, n) + taken(x, x_n * i, x_n) + (k24,) + acc
    if SLABS == 1:
        return gl.inline_asm_elementwise(ONE, ONE_OPERANDS, operands, dtype=(gl.float32,) * 4, is_pure=True, pack=1)
    else:  # noqa: RET505
        return gl.inline_asm_elementwise(FOUR, FOUR_OPERANDS, operands, dtype=(gl.float32,) * 16, is_pure=True, pack=1)

"""INT4 weights times a few rows, on mma.sync: the device code that both products of the experts share.

Words. A *slab* is 16 rows of weights, a *group* 32 columns under one scale, a *step* one MMA of 16 columns. A *pair* is
a row of x and one of its slots; pairs are the columns of the MMA, 8 side by side. Nearly every tensor here holds one
value per thread: [4, 32] = (warp, lane = 4 g + t) in layout LANES, so that the MMA, in inline assembly, needs no layout
conversion. `assert_trivial` has the compiler prove that a change of layout moves nothing.

A code c in 0..15 stands for c - 8. Shifted into the top bits of a bfloat16's fraction it is the number 16 + c (one
shift and one LOP3 for two weights). So a group's sum starts from -24 times the sum of its x, itself an MMA with a
constant matrix, and no weight is subtracted from or multiplied; the scale multiplies the group's sum in float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

LANES = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
MINUS_24 = gl.constexpr(-1044332096)  # twice, as bfloat16

_FRAGMENT = """
  lop3.b32 %A0,%W,0x00780078,0x41804180,0xea; shr.u32 t,%W,4;
  lop3.b32 %A1,t,0x00780078,0x41804180,0xea; shr.u32 t,%W,8;
  lop3.b32 %A2,t,0x00780078,0x41804180,0xea; shf.r.wrap.b32 t,%W,%W,12;
  lop3.b32 %A3,t,0x00780078,0x41804180,0xea;
"""
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "


def fragment(word: str, first: int) -> str:
    text = _FRAGMENT.replace("%W", word)
    for i in range(4):
        text = text.replace(f"%A{i}", f"a{first + i}")
    return text


def _group_code(tiles: int) -> str:
    """acc = fma(group's sum, scale, acc): outputs acc; inputs two words, two scales, x, -24 x, acc (4 a tile each)."""
    n = 4 * tiles
    word0, word1, scale = (f"${n + i}" for i in range(3))
    b, c, acc = ([f"${n + 3 + part * n + i}" for i in range(n)] for part in range(3))
    text = "{ .reg .b32 a0,a1,a2,a3,a4,a5,a6,a7,t,sl,sh; .reg .f32 " + f"d<{n}>;\n"
    text += fragment(word0, 0) + fragment(word1, 4)
    text += f"shl.b32 sl,{scale},16; and.b32 sh,{scale},0xffff0000;\n"
    for i in range(0, n, 4):
        d = f"{{d{i},d{i + 1},d{i + 2},d{i + 3}}}"
        text += MMA + f"{d},{{a0,a1,a2,a3}},{{{b[i]},{b[i + 1]}}},{{{','.join(c[i : i + 4])}}};\n"
        text += MMA + f"{d},{{a4,a5,a6,a7}},{{{b[i + 2]},{b[i + 3]}}},{d};\n"
        for j in range(i, i + 4):
            text += f"fma.rn.f32 ${j},d{j},{'sl' if j < i + 2 else 'sh'},{acc[j]};\n"
    return text + "}"


def _group_operands(tiles: int) -> str:
    n = 4 * tiles
    return ",".join(["=&f"] * n + ["r"] * (3 + n) + ["f"] * (2 * n))


GROUP_1, OPERANDS_1 = gl.constexpr(_group_code(1)), gl.constexpr(_group_operands(1))
GROUP_2, OPERANDS_2 = gl.constexpr(_group_code(2)), gl.constexpr(_group_operands(2))
OFFSET = gl.constexpr(
    "{ .reg .f32 z; mov.f32 z,0f00000000;\n" + MMA + "{$0,$1,$2,$3},{$8,$8,$8,$8},{$4,$5},{z,z,z,z};\n"
    + MMA + "{$0,$1,$2,$3},{$8,$8,$8,$8},{$6,$7},{$0,$1,$2,$3}; }"
)  # fmt: skip


@gluon.jit
def minus_24(zero):
    """-24 in every thread. `zero` is 0, which the compiler does not know: the constant stays out of the loop."""
    return gl.full([4, 32], MINUS_24, gl.int32, LANES) + zero


@gluon.jit
def minus_24_of_warp(zero):
    return gl.full([32], MINUS_24, gl.int32, gl.SliceLayout(0, LANES)) + zero


@gluon.jit
def offset(b, constant):
    """-24 times the sum of a group's 32 values of x, where the accumulator has it."""
    operands = [b[0], b[1], b[2], b[3], constant]
    return gl.inline_asm_elementwise(
        OFFSET, "=&f,=&f,=&f,=&f,r,r,r,r,r", operands, dtype=(gl.float32,) * 4, is_pure=True, pack=1
    )


@gluon.jit
def group(w0, w1, s, b, c, acc, TILES: gl.constexpr):
    """acc + scale * (a group's sum): 16 rows of weights, 8 TILES pairs."""
    if TILES == 1:
        operands = [w0, w1, s, b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], acc[0], acc[1], acc[2], acc[3]]
        return gl.inline_asm_elementwise(GROUP_1, OPERANDS_1, operands, dtype=(gl.float32,) * 4, is_pure=True, pack=1)
    else:  # noqa: RET505  to Gluon, code behind a `return` is code
        operands = [
            w0, w1, s, b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7],
            acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
        ]  # fmt: skip
        return gl.inline_asm_elementwise(GROUP_2, OPERANDS_2, operands, dtype=(gl.float32,) * 8, is_pure=True, pack=1)


@gluon.jit
def zeros(n: gl.constexpr):
    """n accumulators, a multiple of four."""
    z = gl.zeros([4, 32], gl.float32, LANES)
    out = (z, z, z, z)
    for _ in gl.static_range(n // 4 - 1):
        out += (z, z, z, z)  # type: ignore[assignment]
    return out


@gluon.jit
def part(values, r: gl.constexpr, TILES: gl.constexpr):
    """Slab r's accumulators."""
    if TILES == 1:
        return values[4 * r], values[4 * r + 1], values[4 * r + 2], values[4 * r + 3]
    else:  # noqa: RET505
        k: gl.constexpr = 8 * r
        return (
            values[k], values[k + 1], values[k + 2], values[k + 3],
            values[k + 4], values[k + 5], values[k + 6], values[k + 7],
        )  # fmt: skip


@gluon.jit
def places():
    """(warp, g, t) of every thread."""
    warp = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, LANES)), 1).broadcast_to((4, 32))
    lane = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, LANES)), 0).broadcast_to((4, 32))
    return warp, lane // 4, lane % 4


@gluon.jit
def _two(x):
    a, b = gl.split(x)
    return gl.convert_layout(a, LANES, assert_trivial=True), gl.convert_layout(b, LANES, assert_trivial=True)


@gluon.jit
def _four(x):
    a, b = gl.split(gl.reshape(x, (4, 32, 2, 2)))
    a = _two(a)
    b = _two(b)
    return a[0], b[0], a[1], b[1]


@gluon.jit
def _eight(x):
    a, b = gl.split(gl.reshape(x, (4, 32, 4, 2)))
    a = _four(a)
    b = _four(b)
    return a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]


@gluon.jit
def apart(x, n: gl.constexpr):
    """[4, 32, n] -> n tensors [4, 32]"""
    if n == 4:
        return _four(x)
    elif n == 8:  # noqa: RET505
        return _eight(x)
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, (4, 32, 2, n // 2)), (0, 1, 3, 2)))
        return apart(a, n // 2) + apart(b, n // 2)


@gluon.jit
def apart_in_warp(x, n: gl.constexpr):
    """[32, n], the same in every warp -> n tensors [32]"""
    a, b = gl.split(gl.permute(gl.reshape(x, (32, 2, n // 2)), (0, 2, 1)))
    if n == 2:
        lanes: gl.constexpr = gl.SliceLayout(0, LANES)
        a = gl.convert_layout(gl.reshape(a, (32,)), lanes, assert_trivial=True)
        return a, gl.convert_layout(gl.reshape(b, (32,)), lanes, assert_trivial=True)
    else:  # noqa: RET505
        return apart_in_warp(a, n // 2) + apart_in_warp(b, n // 2)


@gluon.jit
def every_warp(v):
    return gl.expand_dims(v, 0).broadcast_to((4, 32))


@gluon.jit
def of_group(values, k: gl.constexpr):
    """The four values of place k, [32] each, in every warp."""
    return (
        every_warp(values[4 * k]), every_warp(values[4 * k + 1]),
        every_warp(values[4 * k + 2]), every_warp(values[4 * k + 3]),
    )  # fmt: skip


@gluon.jit
def round_two(low, high):
    """Two floats as bfloat16 in one word."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0,$2,$1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def times(a, b):
    """a * b, rounded: never part of a fused multiply-add."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0,$1,$2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def copy_async(room, pointers, mask):
    async_copy.async_copy_global_to_shared(room, pointers, mask=mask)

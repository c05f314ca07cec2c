"""The experts' products for many rows: the device code that both share, and what stands before them.

An expert's weights are unpacked once for up to 64 pairs, not for 8 or 16. A program has 256 rows of weights, a warp 64
of them (four slabs), and up to 64 pairs, eight columns of the MMA at a time; of these eights it computes as many as its
tile has, rounded up to two or from four on each. Words are those of moe_fragments.py, and so are a group's sum and what
it starts from, -24 times the sum of its x. Of few rows every tile finds that by itself; here `group_starts` finds it
once a row, with the same two MMAs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.moe_fragments import LANES, apart, copy_async, fragment, minus_24, offset, places

MANY = 64  # pairs of a tile
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
UNPACK = gl.constexpr(
    "{ .reg .b32 t;\n" + (fragment("$10", 0) + fragment("$11", 4)).replace(" a", " $")
    + "shl.b32 $8,$12,16; and.b32 $9,$12,0xffff0000; }"
)  # fmt: skip
SUM = gl.constexpr(
    "{ .reg .f32 d<4>;\n"
    + MMA + "{d0,d1,d2,d3},{$4,$5,$6,$7},{$12,$13},{$16,$17,$18,$19};\n"
    + MMA + "{d0,d1,d2,d3},{$8,$9,$10,$11},{$14,$15},{d0,d1,d2,d3};\n"
    + "fma.rn.f32 $0,d0,$20,$22; fma.rn.f32 $1,d1,$20,$23; fma.rn.f32 $2,d2,$21,$24; fma.rn.f32 $3,d3,$21,$25; }"
)  # fmt: skip
SUM_OPERANDS = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12 + ["f"] * 4 + ["r"] * 2 + ["f"] * 4))
WORDS = gl.constexpr(  # a group's [512, 2], row = warp * 128 + slab * 32 + lane
    gl.DistributedLinearLayout(
        [[0, 1], [32, 0], [64, 0]], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[128, 0], [256, 0]], [], [512, 2]
    )
)
SCALES = gl.constexpr(  # its [128, 1], row = warp * 32 + slab * 8 + g
    gl.DistributedLinearLayout(
        [[8, 0], [16, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[32, 0], [64, 0]], [], [128, 1]
    )
)
BY_LANE = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 32, 1], [4, 1, 1], [2, 1, 0]))
BY_T = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [4, 1, 1, 1], [3, 2, 1, 0]))
MINE = gl.constexpr(  # a step's words [512, 4]: every thread copies those that it will use
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0], [64, 0]],
        [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        [[128, 0], [256, 0]],
        [],
        [512, 4],
    )
)
COPY = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
COPY_2 = gl.constexpr(gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0]))
COPY_1 = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0]))
EIGHT_ROWS = gl.constexpr(  # [64, 16] of int32, row = group * 8 + row of x
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)


@gluon.jit(do_not_specialize=["rows"])
def group_starts(x, starts, rows, K: gl.constexpr):
    """starts [R, K / 32] = -24 times the sums of 32 values of x [R, K] (as int32), as the matrix unit finds them.

    grid (R / 8, K / 256)
    """
    gdc_wait()
    gdc_launch_dependents()
    begin = gl.program_id(0) * 8
    chunk = gl.program_id(1)
    r = gl.arange(0, 64, gl.SliceLayout(1, EIGHT_ROWS))
    row = begin + r % 8
    at = row.to(gl.int64) * (K // 2) + chunk * 128 + r // 8 * 16
    at = gl.expand_dims(at, 1) + gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, EIGHT_ROWS)), 0)
    v = gl.load(x + at, mask=(gl.expand_dims(row, 1) < rows) & (at >= 0), other=0)
    v = gl.permute(gl.reshape(v, (4, 2, 8, 4, 4)), (0, 2, 3, 1, 4))
    v = apart(gl.reshape(v, (4, 32, 8)), 8)
    k24 = minus_24(begin >> 30)
    c = offset((v[0], v[1], v[2], v[3]), k24)
    d = offset((v[4], v[5], v[6], v[7]), k24)
    warp, g, t = places()
    even = begin + 2 * t
    to = starts + even.to(gl.int64) * (K // 32) + chunk * 8 + warp * 2
    gl.store(to, c[0], mask=(g == 0) & (even < rows))
    gl.store(to + 1, d[0], mask=(g == 0) & (even < rows))
    gl.store(to + K // 32, c[1], mask=(g == 0) & (even + 1 < rows))
    gl.store(to + (K // 32 + 1), d[1], mask=(g == 0) & (even + 1 < rows))


@gluon.jit
def fetch(words, scales, room, scale_room, WARP: gl.constexpr, live):
    """Begins to copy 64 columns of 256 rows: tiles of 64 rows, one a warp, are WARP chunks apart."""
    r = gl.expand_dims(gl.arange(0, 512, gl.SliceLayout(1, MINE)), 1)
    at = r // 128 * (WARP * 2048) + r % 128 * 4 + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, MINE)), 0)
    copy_async(room, words + at, (at >= 0) & live)
    r = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, COPY_2)), 1)
    at = r // 32 * (WARP * 256) + r % 32 * 2 + gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, COPY_2)), 0)
    copy_async(scale_room, scales + at, (at >= 0) & live)


@gluon.jit
def _unpacked(w, s, q: gl.constexpr):
    """Slab q's codes of a group as two A operands, and its scales of rows g and g + 8."""
    return gl.inline_asm_elementwise(
        UNPACK, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
        [w[2 * q], w[2 * q + 1], s[q]], dtype=(gl.int32,) * 10, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _sum(a, b, c, acc, i: gl.constexpr):
    """acc + scale * (a group's sum): 16 rows of weights, 8 pairs."""
    operands = [
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], a[8], a[9],
        acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3],
    ]  # fmt: skip
    return gl.inline_asm_elementwise(SUM, SUM_OPERANDS, operands, dtype=(gl.float32,) * 4, is_pure=True, pack=1)


@gluon.jit
def _of_eight(a0, a1, a2, a3, x, starts, acc, h: gl.constexpr, k: gl.constexpr):
    """Group h of four slabs for the tile's k-th eight pairs."""
    b = x.slice((h * 8 + k) * 32, 32, dim=0).load(gl.SliceLayout(0, BY_LANE))
    b = apart(gl.expand_dims(b, 0).broadcast_to((4, 32, 4)), 4)
    c = starts.slice((h * 8 + k) * 4, 4, dim=0).load(gl.SliceLayout(0, gl.SliceLayout(0, BY_T)))
    c = gl.expand_dims(gl.expand_dims(c, 0).broadcast_to((8, 4, 4)), 0).broadcast_to((4, 8, 4, 4))
    c = apart(gl.reshape(c, (4, 32, 4)), 4)
    return (
        _sum(a0, b, c, acc, 4 * k) + _sum(a1, b, c, acc, 4 * k + 1)
        + _sum(a2, b, c, acc, 4 * k + 2) + _sum(a3, b, c, acc, 4 * k + 3)
    )  # fmt: skip


@gluon.jit
def _group(room, scale_room, x, starts, acc, h: gl.constexpr, N: gl.constexpr):
    """Group h of a program's rows and pairs: acc (eight, slab, value)."""
    w = gl.permute(gl.reshape(room.slice(h * 2, 2, dim=1).load(WORDS), (4, 4, 32, 2)), (0, 2, 1, 3))
    w = apart(gl.reshape(w, (4, 32, 8)), 8)
    BY_G: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [4, 1, 1, 1], [3, 2, 1, 0])
    s = gl.permute(gl.reshape(scale_room.slice(h, 1, dim=1).load(SCALES), (4, 4, 8)), (0, 2, 1))
    s = gl.convert_layout(s, gl.SliceLayout(2, BY_G), assert_trivial=True)
    s = apart(gl.reshape(gl.expand_dims(s, 2).broadcast_to((4, 8, 4, 4)), (4, 32, 4)), 4)
    a0 = _unpacked(w, s, 0)
    a1 = _unpacked(w, s, 1)
    a2 = _unpacked(w, s, 2)
    a3 = _unpacked(w, s, 3)
    out = _of_eight(a0, a1, a2, a3, x, starts, acc, h, 0)
    for k in gl.static_range(1, N):
        out = out + _of_eight(a0, a1, a2, a3, x, starts, acc, h, k)
    return out


@gluon.jit
def columns(room, scale_room, x, starts, acc, N: gl.constexpr):
    """64 columns of K, two groups."""
    acc = _group(room, scale_room, x, starts, acc, 0, N)
    return _group(room, scale_room, x, starts, acc, 1, N)


@gluon.jit
def zeros_of(N: gl.constexpr):
    z = gl.zeros([4, 32], gl.float32, LANES)
    out = (z, z, z, z)
    for _ in gl.static_range(4 * N - 1):
        out += (z, z, z, z)  # type: ignore[assignment]
    return out


@gluon.jit
def gathered(x, pairs, SHARE: gl.constexpr, WIDTH: gl.constexpr):
    """Where each pair's row of x [.., WIDTH], int32, has its first 64 columns, 16 bytes a thread; which are real."""
    r = gl.arange(0, 512, gl.SliceLayout(1, COPY))
    pair = gl.load(pairs + r // 4 % 64)
    at = gl.expand_dims(gl.maximum(pair, 0) // SHARE * WIDTH + r // 256 * 16 + r % 4 * 4, 1)
    return x + (at + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, COPY)), 0)), gl.expand_dims(pair >= 0, 1)


@gluon.jit
def starts_of(starts, pairs, SHARE: gl.constexpr, WIDTH: gl.constexpr):
    """The same for two groups' starts [2 * 8 * 4, 4]: of pairs 2 t, 2 t + 1 and these again, as an MMA takes them."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, COPY_1)), 1)
    v = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, COPY_1)), 0)
    pair = gl.load(pairs + r // 4 % 8 * 8 + r % 4 * 2 + v % 2)
    return starts + (gl.maximum(pair, 0) // SHARE * WIDTH + r // 32), pair >= 0


@gluon.jit
def fetch_pairs(x, real, starts, begun, room, starts_room, move):
    """Begins to copy two groups of all pairs, `move` groups from the first on."""
    copy_async(room, x + move * 16, real)
    copy_async(starts_room, starts + move, begun)


@gluon.jit
def eights_of(pairs):
    """How many eights of pairs a tile has."""
    place = gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
    return (gl.sum((gl.load(pairs + place) >= 0).to(gl.int32), 0) + 7) // 8

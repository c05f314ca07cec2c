"""The experts' second product, K = 256, and the weighted sum of a row's slots.

    y[p] = bf16(D_e hidden[p]),  p = r * 8 + slot;   out[r] = base[r] + ((p0 + p2) + (p1 + p3))
    p_i = w[2 i] y[2 i] + w[2 i + 1] y[2 i + 1]      float32, every product rounded; a slot of no expert adds nothing

`down_rows` does all of it for few rows: a program owns 16 outputs of one row, whose slots are the MMA's columns.
`down_tiles` computes y for the pairs of a tile; moe_combine.py sums them in the same order, to the same bits.
Weights, routing and work lists are read before the kernel before this one has ended: they must be older than that one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.moe_chain import all_warps, chain, taken
from kernels.gpu.moe_fragments import (
    FLAT,
    LANES,
    apart,
    apart_in_warp,
    copy_async,
    every_warp,
    group,
    minus_24,
    minus_24_of_warp,
    of_group,
    offset,
    places,
    round_two,
    times,
    zeros,
)

# down_rows: words [8 slots, 512], scales [8, 64] and the partial sums, as its threads take them
ROW_WORDS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 128], [0, 256], [1, 0]], [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
    [[2, 0], [4, 0]], [], [8, 512],
))  # fmt: skip
ROW_SCALES = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 16], [0, 32], [1, 0]], [[0, 0], [0, 0], [0, 2], [0, 4], [0, 8]], [[2, 0], [4, 0]], [], [8, 64],
))  # fmt: skip
ROW_SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [32, 0], [64, 0]], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[0, 0], [0, 0]], [], [128, 2]
    )
)


@gluon.constexpr_function
def _hidden_layout(TILES):
    """hidden of a tile, int32 [64 * TILES, 16], row = (group * TILES + tile) * 8 + pair; the same in every warp."""
    reg = [[0, 1], [0, 2]] + [[8 << i, 0] for i in range(3 + (TILES == 2))]
    return gl.DistributedLinearLayout(
        reg, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[0, 0], [0, 0]], [], [64 * TILES, 16]
    )


@gluon.jit
def _hidden(hidden, pair, TILES: gl.constexpr):
    """All of K as the MMA takes it: 32 TILES words a thread. pair [64 TILES]: each row's; -1: zeros."""
    LAYOUT: gl.constexpr = _hidden_layout(TILES)
    row = gl.arange(0, 64 * TILES, gl.SliceLayout(1, LAYOUT))
    word = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)), 0)
    at = gl.maximum(pair, 0).to(gl.int64) * 128 + row // (8 * TILES) * 16
    real = (gl.expand_dims(pair, 1) >= 0).broadcast_to((64 * TILES, 16))
    h = gl.load(hidden + gl.expand_dims(at, 1) + word, mask=real, other=0)
    h = gl.permute(gl.reshape(h, (8 * TILES, 8, 4, 4)), (1, 2, 0, 3))
    return apart_in_warp(gl.reshape(h, (32, 32 * TILES)), 32 * TILES)  # (group, tile, value)


@gluon.jit
def _offsets(b, k24, TILES: gl.constexpr):
    out = offset((b[0], b[1], b[2], b[3]), k24)
    for k in gl.static_range(1, 8 * TILES):
        out = out + offset((b[4 * k], b[4 * k + 1], b[4 * k + 2], b[4 * k + 3]), k24)
    return out


@gluon.jit
def _fetch(words, scales, room, scale_room, tile, live):
    """Begins to copy 64 rows' weights: 8 KB, and 1 KB of scales."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0])
    r = gl.expand_dims(gl.arange(0, 512, gl.SliceLayout(1, WORDS)), 1)
    at = r * 4 + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, WORDS)), 0)
    copy_async(room, words + tile.to(gl.int64) * 2048 + at, (at >= 0) & live)
    r = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, SCALES)), 1)
    at = r * 2 + gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, SCALES)), 0)
    copy_async(scale_room, scales + tile.to(gl.int64) * 256 + at, (at >= 0) & live)


@gluon.jit
def _weights(ws, ss, j: gl.constexpr):
    """Words and scales of columns [64 j, 64 j + 64), two groups; a warp has its slab."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 2]
    )
    BY_G: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [4, 1, 1], [2, 1, 0])
    w = apart(gl.reshape(ws.slice(j * 128, 128, dim=0).load(WORDS), (4, 32, 4)), 4)
    s0, s1 = gl.split(ss.slice(j * 32, 32, dim=0).load(SCALES))
    s0 = gl.convert_layout(gl.reshape(s0, (4, 8)), gl.SliceLayout(2, BY_G), assert_trivial=True)
    s1 = gl.convert_layout(gl.reshape(s1, (4, 8)), gl.SliceLayout(2, BY_G), assert_trivial=True)
    s0 = gl.reshape(gl.expand_dims(s0, 2).broadcast_to((4, 8, 4)), (4, 32))
    s1 = gl.reshape(gl.expand_dims(s1, 2).broadcast_to((4, 8, 4)), (4, 32))
    s0 = gl.convert_layout(s0, LANES, assert_trivial=True)
    return w[0], w[1], w[2], w[3], s0, gl.convert_layout(s1, LANES, assert_trivial=True)


@gluon.jit
def _kept(room, k: gl.constexpr):
    """An offset that was kept in shared memory."""
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[0, 0], [0, 0]], [], [32, 4]
    )
    c = apart_in_warp(room.slice(k * 32, 32, dim=0).load(LAYOUT), 4)
    return every_warp(c[0]), every_warp(c[1]), every_warp(c[2]), every_warp(c[3])


@gluon.jit
def _offset_of(values, room, k: gl.constexpr, TILES: gl.constexpr):
    if TILES == 1:
        return of_group(values, k)
    else:  # noqa: RET505
        return _kept(room, 2 * k) + _kept(room, 2 * k + 1)


@gluon.jit
def _step(w, h: gl.constexpr, b, c, acc, j: gl.constexpr, TILES: gl.constexpr):
    k: gl.constexpr = (2 * j + h) * TILES
    x = of_group(b, k)
    if TILES == 2:
        x = x + of_group(b, k + 1)
    return group(w[2 * h], w[2 * h + 1], w[4 + h], x, c, acc, TILES)


@gluon.jit
def _store(ya, yb, yc, yd, pa, pb, pc, pd, acc, at, TILES: gl.constexpr):
    gl.store(ya + at, round_two(acc[0], acc[2]), mask=pa >= 0)
    gl.store(yb + at, round_two(acc[1], acc[3]), mask=pb >= 0)
    if TILES == 2:
        gl.store(yc + at, round_two(acc[4], acc[6]), mask=pc >= 0)
        gl.store(yd + at, round_two(acc[5], acc[7]), mask=pd >= 0)


@gluon.jit
def _tile(
    hidden, words, scales, y, pairs, first, n0,
    H: gl.constexpr, TILES: gl.constexpr, OWN: gl.constexpr, TOGETHER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 rows from `first` of all experts' on, `n0` of its own. hidden stays in registers throughout."""
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * TOGETHER, 512, 4], FLAT)
    ss = gl.allocate_shared_memory(gl.int32, [STAGES * TOGETHER, 128, 2], FLAT)
    for i in gl.static_range(STAGES - 1):
        for u in gl.static_range(TOGETHER):
            at = i * TOGETHER + u
            _fetch(words, scales, ws.index(at), ss.index(at), first + at, i * TOGETHER < OWN)
        async_copy.commit_group()
    warp, g, t = places()
    row = gl.arange(0, 64 * TILES, gl.SliceLayout(1, _hidden_layout(TILES)))
    pair = gl.load(pairs + row % (8 * TILES))
    pa = gl.load(pairs + 2 * t)
    pb = gl.load(pairs + 2 * t + 1)
    pc = gl.load(pairs + (8 * TILES - 8) + 2 * t)
    pd = gl.load(pairs + (8 * TILES - 7) + 2 * t)
    gdc_wait()
    gdc_launch_dependents()
    b = _hidden(hidden, pair, TILES)
    cc = _offsets(b, minus_24_of_warp(n0 >> 24), TILES)
    kept = 0
    if TILES == 2:
        kept = gl.allocate_shared_memory(gl.float32, [16 * 32, 4], FLAT)
        for k in gl.static_range(16):
            v = gl.join(gl.join(cc[4 * k], cc[4 * k + 2]), gl.join(cc[4 * k + 1], cc[4 * k + 3]))
            kept.slice(k * 32, 32, dim=0).store(gl.reshape(v, (32, 4)))
    st = 0
    into = STAGES - 1
    y += n0 * 32 + warp * 8 + g
    ya = y + pa.to(gl.int64) * (H // 2)
    yb = y + pb.to(gl.int64) * (H // 2)
    yc = y + pc.to(gl.int64) * (H // 2)
    yd = y + pd.to(gl.int64) * (H // 2)
    for i in range(OWN // TOGETHER):
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()
        nx = (i + STAGES - 1) * TOGETHER
        for u in gl.static_range(TOGETHER):
            at = into * TOGETHER + u
            _fetch(words, scales, ws.index(at), ss.index(at), first + nx + u, nx < OWN)
        async_copy.commit_group()
        acc = zeros(4 * TILES)
        two = zeros(4 * TILES)
        for j in gl.static_range(4):
            c0 = _offset_of(cc, kept, 2 * j, TILES)
            c1 = _offset_of(cc, kept, 2 * j + 1, TILES)
            w = _weights(ws.index(st * TOGETHER), ss.index(st * TOGETHER), j)
            acc = _step(w, 0, b, c0, acc, j, TILES)
            acc = _step(w, 1, b, c1, acc, j, TILES)
            if TOGETHER == 2:
                also = _weights(ws.index(st * TOGETHER + 1), ss.index(st * TOGETHER + 1), j)
                two = _step(also, 0, b, c0, two, j, TILES)
                two = _step(also, 1, b, c1, two, j, TILES)
        _store(ya, yb, yc, yd, pa, pb, pc, pd, acc, i * TOGETHER * 32, TILES)
        if TOGETHER == 2:
            _store(ya, yb, yc, yd, pa, pb, pc, pd, two, i * TOGETHER * 32 + 32, TILES)
        into = st
        st = gl.where(st == STAGES - 1, 0, st + 1)


@gluon.jit
def down_tiles(
    hidden,  # [R * 8, 256] bfloat16, as int32
    words,
    scales,
    y,  # [R * 8, H] bfloat16, as int32
    expert,
    pairs,
    count,
    H: gl.constexpr,
    TILES: gl.constexpr,
    OWN: gl.constexpr,  # tiles of 64 rows that a program has, TOGETHER at a time
    TOGETHER: gl.constexpr,
    STAGES: gl.constexpr,
):
    """grid (H / 64 / OWN, most tiles). A tile of up to eight pairs is computed as one of eight where TILES is 2."""
    n0 = gl.program_id(0) * OWN
    tile = gl.program_id(1)
    n = gl.load(count)
    e = gl.load(expert + tile)
    pairs += tile * 16
    few = 0
    if TILES == 2:
        few = (gl.load(pairs + 8) < 0).to(gl.int32)
    if (tile >= n) | (e >= 131072):  # a tile that stands there twice is computed once
        if tile == 0:  # no tile at all: what comes next still follows what stands before
            gdc_wait()
        return
    first = e % 65536 * (H // 64) + n0
    if few == 0:
        _tile(hidden, words, scales, y, pairs, first, n0, H, TILES, OWN, TOGETHER, STAGES)
    elif TILES == 2:
        _tile(hidden, words, scales, y, pairs, first, n0, H, 1, OWN, TOGETHER, STAGES)


@gluon.jit
def _over_t(a):
    """The sum over the four lanes of a g, of which three are zero: exact."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 u; shfl.sync.bfly.b32 u,$1,2,0x1f,0xffffffff; add.rn.f32 $0,$1,u; "
        "shfl.sync.bfly.b32 u,$0,1,0x1f,0xffffffff; add.rn.f32 $0,$0,u; }",
        "=&f,f",
        [a],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _rounded(y):
    return y.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _row_sums(f):
    """[32, 2]: the warps' parts, added."""
    f = gl.permute(gl.reshape(f, (2, 2, 32, 2)), (2, 3, 1, 0))  # lane, output, warp % 2, warp // 2
    f01, f23 = gl.split(f)
    f0, f1 = gl.split(f01)
    f2, f3 = gl.split(f23)
    return (f0 + f2) + (f1 + f3)


@gluon.jit
def down_rows(
    hidden,
    words,
    scales,
    out,  # [R, H] float32 or bfloat16
    base,  # [R, H]
    chosen,
    weights,
    H: gl.constexpr,
    BASE: gl.constexpr,
):
    """grid (H / 16, R). Warp w multiplies the experts of slots 2 w and 2 w + 1 and keeps their own columns."""
    SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    slab = gl.program_id(0)
    r = gl.program_id(1)
    ws = gl.allocate_shared_memory(gl.int32, [8, 512], FLAT)
    ss = gl.allocate_shared_memory(gl.int32, [8, 64], FLAT)
    e1 = gl.maximum(gl.load(chosen + r * 8 + gl.arange(0, 8, gl.SliceLayout(1, ROW_WORDS))), 0)
    e2 = gl.maximum(gl.load(chosen + r * 8 + gl.arange(0, 8, gl.SliceLayout(1, SCALES))), 0)
    c1 = gl.arange(0, 512, gl.SliceLayout(0, ROW_WORDS))
    c2 = gl.arange(0, 64, gl.SliceLayout(0, SCALES))
    tile = slab // 4
    w1 = gl.expand_dims((e1 * (H // 64) + tile).to(gl.int64) * 2048 + slab % 4 * 128, 1)
    copy_async(ws, words + w1 + gl.expand_dims(c1 // 128 * 512 + c1 % 128, 0), gl.expand_dims(c1, 0) + 0 * w1 >= 0)
    w2 = gl.expand_dims((e2 * (H // 64) + tile).to(gl.int64) * 256 + slab % 4 * 16, 1)
    copy_async(ss, scales + w2 + gl.expand_dims(c2 // 16 * 64 + c2 % 16, 0), gl.expand_dims(c2, 0) + 0 * w2 >= 0)
    async_copy.commit_group()
    warp, _, t = places()
    wa = gl.load(weights + r * 8 + 2 * warp)
    wb = gl.load(weights + r * 8 + 2 * warp + 1)
    PAIR: gl.constexpr = gl.SliceLayout(1, _hidden_layout(1))
    slot = gl.arange(0, 64, PAIR) % 8
    pair = gl.where(gl.load(chosen + r * 8 + slot) >= 0, r * 8 + slot, -1)  # without an expert: zeros
    AT: gl.constexpr = _row_sums(gl.zeros([128, 2], gl.float32, ROW_SUMS)).type.layout
    lane = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, AT)), 1)
    two = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, AT)), 0)
    at = r.to(gl.int64) * H + slab * 16 + lane // 4 * 2 + two
    mine = (lane % 4 == 0) & (two >= 0)
    first = gl.zeros([32, 2], gl.float32, AT)
    gdc_wait()
    gdc_launch_dependents()
    if BASE:
        first = gl.load(base + at, mask=mine, other=0.0).to(gl.float32)
    b = _hidden(hidden, pair, 1)
    x, k24 = all_warps(b, 0, 32), minus_24(slab >> 24)
    async_copy.wait_group(0)
    gl.thread_barrier()
    w = gl.permute(gl.reshape(ws.load(ROW_WORDS), (4, 2, 4, 32, 4)), (0, 3, 1, 2, 4))
    w = apart(gl.reshape(w, (4, 32, 32)), 32)
    BY_G: gl.constexpr = gl.BlockedLayout([1, 1, 1, 16], [1, 8, 4, 1], [4, 1, 1, 1], [3, 2, 1, 0])
    s = gl.permute(gl.reshape(ss.load(ROW_SCALES), (4, 2, 4, 8, 2)), (0, 3, 1, 2, 4))
    s = gl.convert_layout(gl.reshape(s, (4, 8, 16)), gl.SliceLayout(2, BY_G), assert_trivial=True)
    s = apart(gl.reshape(gl.expand_dims(s, 2).broadcast_to((4, 8, 4, 16)), (4, 32, 16)), 16)
    w2, s2 = taken(w, 16, 16), taken(s, 8, 8)  # of the second slot
    y, z = chain(w, s, x, k24, zeros(4), 0, 1), chain(w2, s2, x, k24, zeros(4), 0, 1)
    y, z = chain(w, s, x, k24, y, 1, 1), chain(w2, s2, x, k24, z, 1, 1)
    none = gl.zeros([4, 32], gl.float32, LANES)
    low = times(_rounded(y[0]), wa) + times(_rounded(z[1]), wb)
    high = times(_rounded(y[2]), wa) + times(_rounded(z[3]), wb)
    low = _over_t(gl.where(t == warp, low, none))
    high = _over_t(gl.where(t == warp, high, none))
    room = gl.allocate_shared_memory(gl.float32, [128, 2], FLAT)
    room.store(gl.reshape(gl.join(low, high), (128, 2)))
    gl.thread_barrier()
    sums = _row_sums(room.load(ROW_SUMS))
    if BASE:
        sums = first + sums
    gl.store(out + at, sums.to(out.dtype.element_ty), mask=mine)

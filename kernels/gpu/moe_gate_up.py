"""The experts' first product and their activation: hidden[p] = silu(G_e x[r]) * (U_e x[r]), p = r * 8 + slot.

A program computes SLABS slabs (8 rows of gate and the same 8 of up, each) for the pairs of one tile. Its four warps
split K: warp w takes columns 64 w .. 64 w + 63 of every chunk of 256, so nothing passes between warps until the end,
where ((c0 + c1) + c2) + c3 is their sum. Within a warp: groups in ascending order, acc = fma(group's sum, scale, acc).
SLABS, CHUNKS (a step of the loop) and STAGES say who computes a row and when, never in which order it is added up.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.moe_chain import chain
from kernels.gpu.moe_fragments import FLAT, LANES, apart, copy_async, group, minus_24, offset, part, places, zeros


@gluon.constexpr_function
def _rows_layout(CHUNKS, TILES, V):
    """x of a step: int32 [CHUNKS * 8 * TILES * V, 16]; row = ((chunk * 8 + 2 warp + group) * TILES + tile) * V + pair.

    A thread has 16 bytes of a row. V < 8: only so many rows are there, and the MMA's columns repeat.
    """
    double = {1: 0, 2: 1, 4: 2}[CHUNKS]
    if V < 8:
        reg = [[0, 1], [0, 2], [V, 0]] + [[8 * V << i, 0] for i in range(double)]
        lane = [[0, 4], [0, 8]] + [[1 << i if 1 << i < V else 0, 0] for i in range(3)]
        return gl.DistributedLinearLayout(reg, lane, [[2 * V, 0], [4 * V, 0]], [], [CHUNKS * 8 * V, 16])
    second = [[8, 0]] if TILES == 2 else []
    reg = [[0, 1], [0, 2], *second, [8 * TILES, 0]] + [[64 * TILES << i, 0] for i in range(double)]
    lane = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warp = [[16 * TILES, 0], [32 * TILES, 0]]
    return gl.DistributedLinearLayout(reg, lane, warp, [], [CHUNKS * 64 * TILES, 16])


@gluon.constexpr_function
def _words_layout(Q):
    """Words of a step, [Q * 128, 4], row = (warp * Q + q) * 32 + lane; q = chunk * SLABS + slab."""
    reg = [[0, 1], [0, 2], [32, 0], [64, 0]] + ([[128, 0]] if Q == 8 else [])
    lane = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
    return gl.DistributedLinearLayout(reg, lane, [[32 * Q, 0], [64 * Q, 0]], [], [Q * 128, 4])


@gluon.constexpr_function
def _scales_layout(Q):
    """Scales of a step, [Q * 32, 2], row = (warp * Q + q) * 8 + g."""
    reg = [[0, 1], [8, 0], [16, 0]] + ([[32, 0]] if Q == 8 else [])
    lane = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(reg, lane, [[8 * Q, 0], [16 * Q, 0]], [], [Q * 32, 2])


@gluon.constexpr_function
def _sums_layout(SLABS, TILES):
    """The warps' sums, [SLABS * TILES * 128, 4]: a thread takes all four warps', of one slab or two."""
    reg = [[0, 1], [0, 2], [32, 0], [64, 0]] + ([[128, 0]] if TILES == 2 else [])
    reg += [[512 * TILES, 0]] if SLABS == 8 else []
    slab = [[128 * TILES, 0], [256 * TILES, 0]]
    warp = {1: [[0, 0], [0, 0]], 2: [slab[0], [0, 0]], 4: slab, 8: slab}[SLABS]
    lane = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
    return gl.DistributedLinearLayout(reg, lane, warp, [], [SLABS * TILES * 128, 4])


@gluon.jit
def _fetch(words, scales, room, scale_room, first, step, live, H: gl.constexpr, SLABS: gl.constexpr, Q: gl.constexpr):
    """Begins to copy one step's weights: Q / SLABS chunks of SLABS slabs from slab `first` on."""
    WORDS: gl.constexpr = _words_layout(Q)
    SCALES: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0])
    chunk = (first // 4 * (H // 256) + step * (Q // SLABS)).to(gl.int64)
    r = gl.arange(0, Q * 128, gl.SliceLayout(1, WORDS))
    q = r // 32 % Q
    slab = q % SLABS
    at = slab // 4 * (H * 8) + q // SLABS * 2048 + r // (32 * Q) * 512 + slab % 4 * 128 + r % 32 * 4
    at = gl.expand_dims(at, 1) + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, WORDS)), 0)
    copy_async(room, words + chunk * 2048 + first % 4 * 128 + at, (at >= 0) & live)
    r = gl.arange(0, Q * 32, gl.SliceLayout(1, SCALES))
    q = r // 8 % Q
    slab = q % SLABS
    at = slab // 4 * H + q // SLABS * 256 + r // (8 * Q) * 64 + slab % 4 * 16 + r % 8 * 2
    at = gl.expand_dims(at, 1) + gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, SCALES)), 0)
    copy_async(scale_room, scales + chunk * 256 + first % 4 * 16 + at, (at >= 0) & live)


@gluon.jit
def _slab(w, s, b, c, acc, q: gl.constexpr, h: gl.constexpr, TILES: gl.constexpr):
    return group(w[q * 4 + h * 2], w[q * 4 + h * 2 + 1], s[q * 2 + h], b, c, acc, TILES)


@gluon.jit
def _groups(w, s, x, k24, acc, c: gl.constexpr, h: gl.constexpr, SLABS: gl.constexpr, TILES: gl.constexpr):
    """Group h of chunk c, of all slabs: they share x and its offset."""
    o: gl.constexpr = (c * 2 + h) * TILES * 4
    q: gl.constexpr = c * SLABS
    b = part(x, c * 2 + h, TILES)
    cc = offset((x[o], x[o + 1], x[o + 2], x[o + 3]), k24)
    if TILES == 2:
        cc = cc + offset((x[o + 4], x[o + 5], x[o + 6], x[o + 7]), k24)
    out = _slab(w, s, b, cc, part(acc, 0, TILES), q, h, TILES)
    for r in gl.static_range(1, SLABS):
        out = out + _slab(w, s, b, cc, part(acc, r, TILES), q + r, h, TILES)
    return out


@gluon.jit
def _by_warp(v, SLABS: gl.constexpr):
    """[SLABS * 32] (slab, lane), the same in the other warps -> [4, 32]"""
    if SLABS == 4:
        return gl.convert_layout(gl.reshape(v, (4, 32)), LANES, assert_trivial=True)
    elif SLABS == 2:  # noqa: RET505
        WIDE: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 1, 32], [2, 2, 1], [2, 1, 0])
        v = gl.convert_layout(gl.reshape(v, (2, 32)), gl.SliceLayout(0, WIDE), assert_trivial=True)
        v = gl.expand_dims(v, 0).broadcast_to((2, 2, 32))
        return gl.convert_layout(gl.reshape(v, (4, 32)), LANES, assert_trivial=True)
    else:
        v = gl.convert_layout(v, gl.SliceLayout(0, LANES), assert_trivial=True)
        return gl.expand_dims(v, 0).broadcast_to((4, 32))


@gluon.jit
def _store(hidden, g0, u0, g1, u1, p0, p1, column, mine):
    y0 = g0 / (1.0 + gl.exp(-g0)) * u0
    y1 = g1 / (1.0 + gl.exp(-g1)) * u1
    gl.store(hidden + p0.to(gl.int64) * 256 + column, y0.to(gl.bfloat16), mask=(p0 >= 0) & mine)
    gl.store(hidden + p1.to(gl.int64) * 256 + column, y1.to(gl.bfloat16), mask=(p1 >= 0) & mine)


@gluon.jit
def _finish(hidden, sums, own, first, SLABS: gl.constexpr, TILES: gl.constexpr):
    """sums [SLABS * TILES, 32, 4] of up to four slabs (a warp each): row g is gate's, g + 8 up's, of one column."""
    warp, g, _ = places()
    column = (first + warp % SLABS) * 8 + g
    f = gl.permute(gl.reshape(sums, (SLABS, TILES, 32, 2, 2)), (0, 2, 4, 1, 3))
    even, odd = gl.split(gl.permute(gl.reshape(f, (SLABS * 32, 2, TILES, 2)), (0, 2, 3, 1)))  # pairs 2 t, 2 t + 1
    ga, ua = gl.split(even)
    gb, ub = gl.split(odd)
    mine = warp < SLABS
    if TILES == 1:
        ga = _by_warp(gl.reshape(ga, (SLABS * 32,)), SLABS)
        ua = _by_warp(gl.reshape(ua, (SLABS * 32,)), SLABS)
        gb = _by_warp(gl.reshape(gb, (SLABS * 32,)), SLABS)
        ub = _by_warp(gl.reshape(ub, (SLABS * 32,)), SLABS)
        _store(hidden, ga, ua, gb, ub, own[0], own[1], column, mine)
    else:
        ga0, ga1 = gl.split(ga)
        ua0, ua1 = gl.split(ua)
        gb0, gb1 = gl.split(gb)
        ub0, ub1 = gl.split(ub)
        ga0, ua0, gb0, ub0 = _by_warp(ga0, SLABS), _by_warp(ua0, SLABS), _by_warp(gb0, SLABS), _by_warp(ub0, SLABS)
        _store(hidden, ga0, ua0, gb0, ub0, own[0], own[1], column, mine)
        ga1, ua1, gb1, ub1 = _by_warp(ga1, SLABS), _by_warp(ua1, SLABS), _by_warp(gb1, SLABS), _by_warp(ub1, SLABS)
        _store(hidden, ga1, ua1, gb1, ub1, own[2], own[3], column, mine)


@gluon.constexpr_function
def _copy_layout(CHUNKS, TILES, V):
    return gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]) if V < 8 else _rows_layout(CHUNKS, TILES, V)


@gluon.jit
def _pairs_of_rows(pairs, TILES: gl.constexpr, V: gl.constexpr, CHUNKS: gl.constexpr):
    """The pair of each row of x's room."""
    XC: gl.constexpr = _copy_layout(CHUNKS, TILES, V)
    return gl.load(pairs + gl.arange(0, CHUNKS * 8 * TILES * V, gl.SliceLayout(1, XC)) % (TILES * V))


@gluon.jit
def _own(pairs, TILES: gl.constexpr):
    """The pairs of a thread's columns, two a tile of eight."""
    _, _, t = places()
    own = gl.load(pairs + 2 * t), gl.load(pairs + 2 * t + 1)
    if TILES == 2:
        own += (gl.load(pairs + 2 * t + 8), gl.load(pairs + 2 * t + 9))  # type: ignore[assignment]
    return own


@gluon.jit
def _tile(
    x, words, scales, hidden, own, pair, first, slab,
    H: gl.constexpr, TILES: gl.constexpr, V: gl.constexpr, SLABS: gl.constexpr, CHUNKS: gl.constexpr,
    STAGES: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Slabs `first` .. of all experts' (`slab` .. of its own) for a tile's pairs; `own`: what a thread stores."""
    Q: gl.constexpr = SLABS * CHUNKS
    STEPS: gl.constexpr = H // 256 // CHUNKS
    ROWS: gl.constexpr = CHUNKS * 8 * TILES * V
    XL: gl.constexpr = _rows_layout(CHUNKS, TILES, V)
    XC: gl.constexpr = _copy_layout(CHUNKS, TILES, V)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, XC))
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, Q * 128, 4], FLAT)
    ss = gl.allocate_shared_memory(gl.int32, [STAGES, Q * 32, 2], FLAT)
    xs = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, 16], FLAT)
    word = gl.arange(0, 16, gl.SliceLayout(0, XC))
    row = (gl.maximum(pair, 0) // 8).to(gl.int64) * (H // 2) + r // (TILES * V) * 16
    xp = x + gl.expand_dims(row, 1) + gl.expand_dims(word, 0)
    real = gl.expand_dims(pair, 1) >= 0
    for i in gl.static_range(STAGES - 1):
        _fetch(words, scales, ws.index(i), ss.index(i), first, i, i < STEPS, H, SLABS, Q)
        copy_async(xs.index(i), xp + i * (128 * CHUNKS), real & (i < STEPS))
        async_copy.commit_group()
    if V == 1:  # down_rows asks for all its weights at once: behind these
        gdc_launch_dependents()
    k24 = minus_24(slab >> 24)
    acc = zeros(SLABS * TILES * 4)
    st = 0
    into = STAGES - 1
    for i in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()
        nx = i + STAGES - 1
        _fetch(words, scales, ws.index(into), ss.index(into), first, nx, nx < STEPS, H, SLABS, Q)
        copy_async(xs.index(into), xp + nx * (128 * CHUNKS), real & (nx < STEPS))
        async_copy.commit_group()
        w = gl.reshape(ws.index(st).load(_words_layout(Q)), (4, Q, 32, 4))
        w = apart(gl.reshape(gl.permute(w, (0, 2, 1, 3)), (4, 32, Q * 4)), Q * 4)
        BY_G: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2 * Q], [1, 8, 4, 1], [4, 1, 1, 1], [3, 2, 1, 0])
        sv = gl.permute(gl.reshape(ss.index(st).load(_scales_layout(Q)), (4, Q, 8, 2)), (0, 2, 1, 3))
        sv = gl.convert_layout(gl.reshape(sv, (4, 8, 2 * Q)), gl.SliceLayout(2, BY_G), assert_trivial=True)
        s = apart(gl.reshape(gl.expand_dims(sv, 2).broadcast_to((4, 8, 4, 2 * Q)), (4, 32, 2 * Q)), 2 * Q)
        if V < 8:
            REPEAT: gl.constexpr = gl.BlockedLayout(
                [1, 1, 1, 1, CHUNKS * 8], [1, 8 // V, V, 4, 1], [4, 1, 1, 1, 1], [4, 3, 2, 1, 0]
            )
            xv = gl.permute(gl.reshape(xs.index(st).load(XL), (CHUNKS, 4, 2, V, 4, 4)), (1, 3, 4, 0, 2, 5))
            xv = gl.reshape(xv, (4, V, 4, CHUNKS * 8))
            xv = gl.expand_dims(gl.convert_layout(xv, gl.SliceLayout(1, REPEAT), assert_trivial=True), 1)
            xv = xv.broadcast_to((4, 8 // V, V, 4, CHUNKS * 8))
        else:
            xv = gl.reshape(xs.index(st).load(XL), (CHUNKS, 4, 2, TILES, 8, 4, 4))
            xv = gl.permute(xv, (1, 4, 5, 0, 2, 3, 6))
        xv = apart(gl.reshape(xv, (4, 32, CHUNKS * TILES * 8)), CHUNKS * TILES * 8)
        if TILES == 1 and (SLABS == 1 or SLABS == 4):
            for i in gl.static_range(CHUNKS // 2 if SLABS == 1 else CHUNKS):
                acc = chain(w, s, xv, k24, acc, i, SLABS)
        else:
            for c in gl.static_range(CHUNKS):
                for h in gl.static_range(2):
                    acc = _groups(w, s, xv, k24, acc, c, h, SLABS, TILES)
        into = st
        st = gl.where(st == STAGES - 1, 0, st + 1)
    async_copy.wait_group(0)
    room = gl.allocate_shared_memory(gl.float32, [SLABS * TILES * 128, 4], FLAT)  # (slab * TILES + tile, warp, lane)
    for k in gl.static_range(SLABS * TILES):
        v = gl.join(gl.join(acc[4 * k], acc[4 * k + 2]), gl.join(acc[4 * k + 1], acc[4 * k + 3]))
        room.slice(k * 128, 128, dim=0).store(gl.reshape(v, (128, 4)))
    gl.thread_barrier()
    f = gl.reshape(room.load(_sums_layout(SLABS, TILES)), (SLABS * TILES, 2, 2, 32, 4))
    even, odd = gl.split(gl.permute(f, (0, 3, 4, 1, 2)))  # warps 0, 2 and 1, 3
    f0, f2 = gl.split(even)
    f1, f3 = gl.split(odd)
    f = ((f0 + f1) + f2) + f3  # [SLABS * TILES, 32, 4]
    if LATE:
        gdc_wait()
    if SLABS == 8:
        low, high = gl.split(gl.permute(gl.reshape(f, (2, 4 * TILES, 32, 4)), (1, 2, 3, 0)))
        _finish(hidden, low, own, slab, 4, TILES)
        _finish(hidden, high, own, slab + 4, 4, TILES)
    else:
        _finish(hidden, f, own, slab, SLABS, TILES)


@gluon.jit
def gate_up_tiles(
    x,  # [R, H] bfloat16, as int32
    words,
    scales,
    hidden,  # [R * 8, 256]
    expert,
    pairs,
    count,
    H: gl.constexpr,
    TILES: gl.constexpr,  # of 8 pairs
    V: gl.constexpr,  # pairs of a tile, or 8
    SLABS: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    HALVES: gl.constexpr,
    LATE: gl.constexpr,
):
    """grid (32 / SLABS, most tiles); SLABS = 4 with HALVES: of a half tile a program has two slabs.

    A tile of up to eight pairs is computed as one of eight where TILES is 2. LATE: x, routing and work list are older
    than the kernel before this one, for which nothing but the results waits.
    """
    if not LATE:
        gdc_wait()
    if V > 1:
        gdc_launch_dependents()
    pid = gl.program_id(0)
    tile = gl.program_id(1)
    e = gl.load(expert + tile)
    if V == 1:  # the work list is `chosen` itself
        n = tile + 1
        pair = gl.full([CHUNKS * 8 * TILES], 0, gl.int32, gl.SliceLayout(1, _copy_layout(CHUNKS, TILES, V))) + tile
        none = gl.full([4, 32], -1, gl.int32, LANES)
        own = gl.where(places()[2] == 0, none + tile + 1, none), none
    else:
        n = gl.load(count)
        pairs += tile * 16
        pair = _pairs_of_rows(pairs, TILES, V, CHUNKS)
        own = _own(pairs, TILES)
    few = 0
    if TILES == 2:
        ninth = gl.load(pairs + 8)
        of_few = _pairs_of_rows(pairs, 1, V, CHUNKS)
    if (tile >= n) | (e < 0):
        if LATE:
            gdc_wait()
        return
    half = 0
    if HALVES:
        half = e // 65536
        e = e % 65536
    if TILES == 2:
        few = (ninth < 0).to(gl.int32)
    slab = pid * SLABS
    first = e * 32 + slab
    if half + few == 0:
        _tile(x, words, scales, hidden, own, pair, first, slab, H, TILES, V, SLABS, CHUNKS, STAGES, LATE)
    elif HALVES:
        slab = half * 16 - 16 + pid * 2
        mine = _pairs_of_rows(pairs, 1, 8, 2)
        _tile(x, words, scales, hidden, own, mine, e * 32 + slab, slab, H, 1, 8, 2, 2, 3, LATE)
    elif TILES == 2:
        two = own[0], own[1]
        _tile(x, words, scales, hidden, two, of_few, first, slab, H, 1, V, SLABS, CHUNKS, STAGES, LATE)

"""The prefix of many lines: tiles of 64, eight warps (the loop: mla_wide.py).

Only blocks of 64 keys that lie wholly in the prefix are done here, so there is no mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from kernels.gpu.mla_device import LOWEST, by_lane, fill, follow, lane_layout, portion, row_sum
from kernels.gpu.mla_wide import begin, queue, rooms, turn, weigh


@gluon.jit(do_not_specialize=["B", "G", "H", "pt_stride"])
def prefix_wide(
    q_latents,  # as prefix_narrow
    q_ropes,
    latents,
    ropes,
    PAGES,
    LENS,
    ROWS,
    WIDTHS,
    SUMS,
    SCALARS,
    OPEN,
    OPEN_SUMS,
    B,
    G,
    H,
    pt_stride,
    C: gl.constexpr,
    P: gl.constexpr,
    SPLITS: gl.constexpr,
    BP: gl.constexpr,
):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])  # [64 lines, 64 keys]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])  # [64 lines, C columns]
    LINE: gl.constexpr = gl.SliceLayout(1, S)
    OLINE: gl.constexpr = gl.SliceLayout(1, ACC)
    pid = gl.program_id(0)
    follow(pid)
    b, k0, k1, line0, lines, full, sbk = portion(pid, G, ROWS, LENS, WIDTHS, B, H, 64, BP, SPLITS, 8)
    n = gl.minimum(k1 * sbk, full) - k0 * sbk

    q, qe, kb, keb, pbuf, bar = rooms(C, P)
    zs = gl.zeros([64, 64], gl.float32, S)
    page = PAGES + b * pt_stride + k0 * sbk
    if n > 0:
        begin(page, n, line0, q_latents, q_ropes, latents, ropes, q, qe, kb, keb, bar, C, P)
    it = 0  # blocks done
    lc = zs
    acc = gl.zeros([64, C], gl.float32, ACC)
    for k in range(k0, k1):
        acc = gl.zeros([64, C], gl.float32, ACC)
        m = gl.full([64], LOWEST, gl.float32, LINE)
        lc = gl.zeros([64, 64], gl.float32, S)
        s = warpgroup_mma_wait(0, deps=[queue(it & 1, (it >> 1) & 1, q, qe, kb, keb, bar, zs)])
        for _ in range(gl.minimum(sbk, full - k * sbk) - 1):
            row2 = gl.load(page + it + 2, mask=it + 2 < n, other=0) * 64
            s, m, lc, acc = turn(it, n, row2, s, m, lc, acc, latents, ropes, q, qe, kb, keb, pbuf, bar, zs, OLINE, C, P)
            it += 1
        last = it & 1
        row2 = gl.load(page + it + 2, mask=it + 2 < n, other=0) * 64
        m, lc, acc = weigh(s, m, lc, acc, pbuf, OLINE)
        pv = warpgroup_mma(pbuf, kb.index(last), acc, is_async=True)
        total = row_sum(lc, 1)
        acc = warpgroup_mma_wait(0, deps=[pv])
        gl.thread_barrier()
        fill(latents, ropes, row2, bar.index(last), kb.index(last), keb.index(last), C, P, it + 2 < n)
        it += 1
        line = gl.arange(0, 64, LINE)
        place = line0.to(gl.int64) * SPLITS + k
        SUM: gl.constexpr = lane_layout(C)
        sums = gl.convert_layout(by_lane(acc.to(gl.bfloat16)), SUM, assert_trivial=True)
        oline = gl.arange(0, 64, gl.SliceLayout(1, SUM))
        column = gl.arange(0, C, gl.SliceLayout(0, SUM))
        keep = (oline < lines) & (k < SPLITS)
        gl.store(SUMS + place * C + oline[:, None] * (SPLITS * C) + column[None, :], sums, mask=keep[:, None])
        keep = (line < lines) & (k < SPLITS)
        gl.store(SCALARS + place * 2 + line * (2 * SPLITS), m, mask=keep)
        gl.store(SCALARS + place * 2 + line * (2 * SPLITS) + 1, total, mask=keep)
    # what the rows' own keys go on from; only the sequence's last program can end inside a split
    line = gl.arange(0, 64, LINE)
    key = gl.arange(0, 64, gl.SliceLayout(0, S))
    unfinished = (line < lines) & (n % sbk != 0)
    gl.store(OPEN + line0 * 64 + line[:, None] * 64 + key[None, :], lc, mask=unfinished[:, None])
    oline = gl.arange(0, 64, OLINE)
    column = gl.arange(0, C, gl.SliceLayout(0, ACC))
    unfinished = (oline < lines) & (n % sbk != 0)
    gl.store(OPEN_SUMS + line0 * C + oline[:, None] * C + column[None, :], acc, mask=unfinished[:, None])

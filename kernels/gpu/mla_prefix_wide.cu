// The prefix of many lines, as prefix_wide (mla_prefix_wide.py): same work, same states, same bits; C = 512, P = 64.
// One program: 64 lines, three warpgroups. The first has the scores: Q K^T of a block of 64 keys, the running maximum,
// the weights, the row sum's 64 terms a line. The other two have half of the output's columns each: what was summed
// before times the maximum's change, then P V. In the matrix unit one block's left half of P V comes first, then the
// next block's Q K^T, then the right half, beside that block's softmax. A page is refilled by halves, by whoever is
// done with the half: the left one has come when Q K^T asks for it. `early`: all but the queries is older than the
// kernel before this one, so the first pages come while that one runs.

typedef unsigned int u32;
typedef unsigned long long u64;
struct Map { alignas(64) u64 words[16]; };  // CUtensorMap

constexpr int C = 512, BOX = 8192;  // bytes of 64 rows of 64 columns, swizzled by 128 bytes
constexpr int PAGE = 9 * BOX;
constexpr int KEYS = PAGE, PROBS = 3 * PAGE, CHANGE = PROBS + BOX, BARS = CHANGE + 512, LIST = BARS + 128;
constexpr float LOG2E = 1.4426950408889634f, LOWEST = -1e20f, FINEST = 4294967296.0f;
constexpr u64 K_MAJOR = 0x4000004000000000ull, MN_MAJOR = 0x4000004002000000ull;  // descriptors: 128-byte swizzle

#define EIGHT(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
    "+f"(d[i + 6]), "+f"(d[i + 7])
#define MANY(d, i) EIGHT(d, i), EIGHT(d, i + 8), EIGHT(d, i + 16), EIGHT(d, i + 24)

// Scores of 64 lines and 64 keys: 16 columns more. `add`: to what is there.
__device__ __forceinline__ void scores_16(float (&d)[32], u64 a, u64 b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;}" : MANY(d, 0) : "l"(a), "l"(b), "r"(add));
}

// Output of 64 lines and 256 columns: 16 keys more.
__device__ __forceinline__ void values_16(float (&d)[128], u64 a, u64 b) {
    asm volatile(
        "{wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, 1, 1, 1, 0, 1;}" : MANY(d, 0), MANY(d, 32), MANY(d, 64), MANY(d, 96) : "l"(a), "l"(b));
}

__device__ __forceinline__ float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 pair(float lo, float hi) {  // as bf16
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
__device__ __forceinline__ void expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}
__device__ __forceinline__ void wait(u32 bar, int parity) {
    asm volatile(
        "{.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;}"
        :: "r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy(const Map *map, int group, int row, u32 to, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];"
        :: "r"(to), "l"(map), "r"(0), "r"(row), "r"(group), "r"(bar) : "memory");
}
__device__ __forceinline__ void follow() {
    asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void fence_mma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void drain() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers: queries; of each of two places: rotated part, left and right half of the latents, change;
// weights there, weights used, scores done.
#define ROPE_(s) (bars + 8 + (s) * 8)
#define HALF_(h, s) (bars + 24 + (h) * 16 + (s) * 8)
#define CHANGED_(s) (bars + 56 + (s) * 8)
#define WEIGHED (bars + 72)
#define USED (bars + 80)
#define SCORED (bars + 88)

extern "C" __global__ void __launch_bounds__(384, 1) mla_prefix_wide(
    const __grid_constant__ Map q_half, const __grid_constant__ Map q_rope,  // boxes of four groups of columns, of one
    const __grid_constant__ Map half, const __grid_constant__ Map rope, const int *PAGES, const int *LENS,
    const int *ROWS, const int *WIDTHS, unsigned short *SUMS, float *SCALARS, float *OPEN, float *OPEN_SUMS,
    int B, int G, int H, int stride, int SPLITS, int early) {
    extern __shared__ char raw[];
    const u32 base = ((u32)__cvta_generic_to_shared(raw) + 1023) & ~1023u;
    char *shared = raw + (base - (u32)__cvta_generic_to_shared(raw));
    const u32 bars = base + BARS;
    const int t = threadIdx.x, lane = t & 31;
    const int wg = __shfl_sync(~0u, t >> 7, 0);
    int *list = (int *)(shared + LIST);  // of each sequence: tiles, splits; the share
    if (t == 0) {
        const int counts[12] = {1, 1, 1, 1, 1, 1, 1, 128, 128, 128, 2, 4};
#pragma unroll
        for (int i = 0; i < 12; i++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bars + i * 8), "r"(counts[i]));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_proxy();
        list[128] = SPLITS;
    }
    if (!early) follow();
    if (t < B) {
        list[t] = ((ROWS[t + 1] - ROWS[t]) * H + 63) / 64;
        list[64 + t] = (LENS[t] / 64 + WIDTHS[t] / 64 - 1) / (WIDTHS[t] / 64);
    }
    __syncthreads();
    for (int trial = t + 1; trial <= SPLITS; trial += 384) {  // as many splits a program as make at most G programs
        int programs = 0;
        for (int i = 0; i < B; i++) programs += list[i] * ((list[64 + i] + trial - 1) / trial);
        if (programs <= G) atomicMin(list + 128, trial);
    }
    __syncthreads();
    const int share = list[128];
    int b = 0, place = blockIdx.x, chunks = 0;
    for (; b < B; b++) {
        chunks = (list[64 + b] + share - 1) / share;
        if (place < list[b] * chunks) break;
        place -= list[b] * chunks;
    }
    if (b == B) {
        if (early) follow();
        return;
    }
    const int tile = place / chunks, k0 = place % chunks * share, k1 = min(list[64 + b], k0 + share);
    const int first = ROWS[b], sbk = WIDTHS[b] / 64, full = LENS[b] / 64;
    const int line0 = first * H + tile * 64, lines = (ROWS[b + 1] - first) * H - tile * 64;
    const int n = min(k1 * sbk, full) - k0 * sbk;
    const int *page = PAGES + (long long)b * stride + k0 * sbk;
    const int row = (t >> 5 & 3) * 16 + (lane >> 2);  // and row + 8

    if (wg == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        if (early) follow();
        float lc[32], s[32];
        float m0, m1;
        int it = 0;
        wait(bars, 0);
        for (int k = k0; k < k1; k++) {
            m0 = m1 = LOWEST;
#pragma unroll
            for (int i = 0; i < 32; i++) lc[i] = 0.0f;
            const int blocks = min(sbk, full - k * sbk);
            for (int j = 0; j < blocks; j++, it++) {
                const int at = it & 1, phase = it >> 1 & 1;
                const u64 qd = K_MAJOR | (base >> 4), kd = K_MAJOR | ((base + KEYS + at * PAGE) >> 4);
                wait(ROPE_(at), phase);
                fence_mma();
#pragma unroll
                for (int g = 0; g < 4; g++)
                    scores_16(s, qd + 8 * (BOX >> 4) + g * 2, kd + 8 * (BOX >> 4) + g * 2, g > 0);
                wait(HALF_(0, at), phase);
#pragma unroll
                for (int g = 0; g < 16; g++)
                    scores_16(s, qd + (g >> 2) * (BOX >> 4) + (g & 3) * 2, kd + (g >> 2) * (BOX >> 4) + (g & 3) * 2, 1);
                wait(HALF_(1, at), phase);
#pragma unroll
                for (int g = 16; g < 32; g++)
                    scores_16(s, qd + (g >> 2) * (BOX >> 4) + (g & 3) * 2, kd + (g >> 2) * (BOX >> 4) + (g & 3) * 2, 1);
                commit();
                drain();
                if (lane == 0) arrive(SCORED);
                float x0 = s[0], x1 = s[2];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    x0 = fmaxf(x0, fmaxf(s[4 * i], s[4 * i + 1]));
                    x1 = fmaxf(x1, fmaxf(s[4 * i + 2], s[4 * i + 3]));
                }
#pragma unroll
                for (int i = 1; i < 4; i *= 2) {
                    x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, i));
                    x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, i));
                }
                x0 = fmaxf(m0, __fmul_rn(x0, LOG2E));
                x1 = fmaxf(m1, __fmul_rn(x1, LOG2E));
                const float a0 = exp2_(__fsub_rn(m0, x0)), a1 = exp2_(__fsub_rn(m1, x1));
                m0 = x0;
                m1 = x1;
                float *change = (float *)(shared + CHANGE) + at * 64;
                if ((lane & 3) == 0) {
                    change[row] = a0;
                    change[row + 8] = a1;
                }
                arrive(CHANGED_(at));
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    s[i] = exp2_(__fmaf_rn(s[i], LOG2E, (i & 2) ? -m1 : -m0));
                    lc[i] = __fmaf_rn(lc[i], (i & 2) ? a1 : a0, s[i]);
                }
                wait(USED, (it & 1) ^ 1);
                char *to = shared + PROBS + row * 128 + (lane & 3) * 4;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    *(u32 *)(to + ((i ^ (row & 7)) << 4)) = pair(s[4 * i], s[4 * i + 1]);
                    *(u32 *)(to + 1024 + ((i ^ (row & 7)) << 4)) = pair(s[4 * i + 2], s[4 * i + 3]);
                }
                fence_proxy();
                arrive(WEIGHED);
            }
            long long sum0 = 0, sum1 = 0;  // in fixed point: one sum in any order
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const long long x = __float2ll_rz(__fmul_rn(lc[i], FINEST));
                if (i & 2) sum1 += x; else sum0 += x;
            }
#pragma unroll
            for (int i = 1; i < 4; i *= 2) {
                sum0 += __shfl_xor_sync(~0u, sum0, i);
                sum1 += __shfl_xor_sync(~0u, sum1, i);
            }
            if ((lane & 3) < 2 && k < SPLITS) {
                const int mine = row + (lane & 1) * 8;
                float2 both;
                both.x = (lane & 1) ? m1 : m0;
                both.y = __fmul_rn(__ll2float_rn((lane & 1) ? sum1 : sum0), 1.0f / FINEST);
                if (mine < lines) *(float2 *)(SCALARS + ((long long)(line0 + mine) * SPLITS + k) * 2) = both;
            }
        }
        if (lane == 0) arrive(SCORED);  // nothing comes after the last block
        if (n % sbk != 0) {  // what the rows' own keys go on from
            float *to = OPEN + (long long)(line0 + row) * 64 + (lane & 3) * 2;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (row < lines) *(float2 *)(to + i * 8) = make_float2(lc[4 * i], lc[4 * i + 1]);
                if (row + 8 < lines) *(float2 *)(to + 512 + i * 8) = make_float2(lc[4 * i + 2], lc[4 * i + 3]);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
        const int h = wg - 1;  // half of the columns
        const bool asks = (t & 127) == 0;
        const u32 mine = base + KEYS + h * 4 * BOX;
        float acc[128];
        auto fill = [&](int at, int slot) {
            if (h == 0) {
                expect(ROPE_(at), BOX);
                copy(&rope, 8, slot, base + KEYS + at * PAGE + 8 * BOX, ROPE_(at));
            }
            expect(HALF_(h, at), 4 * BOX);
            copy(&half, h * 4, slot, mine + at * PAGE, HALF_(h, at));
        };
        if (asks)
            for (int i = 0; i < min(2, n); i++) fill(i, page[i] * 64);
        if (early) follow();
        if (asks && h == 0) {
            expect(bars, PAGE);
            copy(&q_rope, 8, line0, base + 8 * BOX, bars);
            copy(&q_half, 0, line0, base, bars);
            copy(&q_half, 4, line0, base + 4 * BOX, bars);
        }
        __syncwarp();
        int next = asks && n > 2 ? page[2] : 0;
        int it = 0;
        for (int k = k0; k < k1; k++) {
            const int blocks = min(sbk, full - k * sbk);
#pragma unroll
            for (int i = 0; i < 128; i++) acc[i] = 0.0f;
            for (int j = 0; j < blocks; j++, it++) {
                const int at = it & 1, phase = it >> 1 & 1;
                wait(CHANGED_(at), phase);
                const float *change = (const float *)(shared + CHANGE) + at * 64;
                const float a0 = change[row], a1 = change[row + 8];
#pragma unroll
                for (int i = 0; i < 128; i++) acc[i] = __fmul_rn(acc[i], (i & 2) ? a1 : a0);
                wait(HALF_(h, at), phase);
                wait(WEIGHED, it & 1);
                const u64 pd = K_MAJOR | ((base + PROBS) >> 4), vd = MN_MAJOR | ((mine + at * PAGE) >> 4);
                if (h == 1) wait(SCORED, (it + 1) & 1);  // the right half after the next block's scores
                fence_mma();
#pragma unroll
                for (int g = 0; g < 4; g++) values_16(acc, pd + g * 2, vd + g * 128);
                commit();
                drain();
                if (h == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
                else asm volatile("bar.sync 2, 128;" ::: "memory");
                if (asks) {
                    arrive(USED);
                    if (it + 2 < n) {
                        fill(at, next * 64);
                        next = it + 3 < n ? page[it + 3] : 0;
                    }
                }
                __syncwarp();
            }
            // columns (g, j, c, e) in the order (g, c, j, e)
            unsigned short *to = SUMS + ((long long)(line0 + row) * SPLITS + k) * C + h * 256 + (lane & 3) * 8;
            if (k < SPLITS) {
#pragma unroll
                for (int part = 0; part < 128; part += 64) {
                    u32 kept[32];  // registers of their own: a store must not wait for the one before
#pragma unroll
                    for (int i = 0; i < 32; i++) kept[i] = pair(acc[part + 2 * i], acc[part + 2 * i + 1]);
#pragma unroll
                    for (int g = 0; g < 4; g++) {
                        const u32 *x = kept + g * 8;
                        unsigned short *at = to + (part / 16 + g) * 32;
                        if (row < lines) *(uint4 *)at = make_uint4(x[0], x[2], x[4], x[6]);
                        if (row + 8 < lines)
                            *(uint4 *)(at + (long long)8 * SPLITS * C) = make_uint4(x[1], x[3], x[5], x[7]);
                    }
                }
            }
        }
        if (n % sbk != 0) {
            float *to = OPEN_SUMS + (long long)(line0 + row) * C + h * 256 + (lane & 3) * 2;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                if (row < lines) *(float2 *)(to + i * 8) = make_float2(acc[4 * i], acc[4 * i + 1]);
                if (row + 8 < lines) *(float2 *)(to + 8 * C + i * 8) = make_float2(acc[4 * i + 2], acc[4 * i + 3]);
            }
        }
    }
}

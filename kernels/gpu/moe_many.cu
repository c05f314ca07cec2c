// The experts' products for many rows, as gate_up_many and down_many (moe_many_products.py): same work, same bits.
// A warp has 64 rows of weights (four slabs) and up to 64 pairs, eight columns of the MMA at a time. Four slabs' sums
// are under way together: the first MMAs of all, then the second ones, and what eight pairs before left to be scaled
// and added stands between them. Two steps of 64 columns are on their way.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int H = 7168, INNER = 256, STEPS = H / 64, PAIRS = 64;

__device__ __forceinline__ void mma(float (&d)[4], const u32 *a, u32 b0, u32 b1, const float (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
__device__ __forceinline__ u32 codes(u32 word) {  // two numbers 16 + code
    u32 y;
    asm("lop3.b32 %0, %1, 0x00780078, 0x41804180, 0xea;" : "=r"(y) : "r"(word));
    return y;
}
__device__ __forceinline__ void unpack(u32 *a, u32 word) {
    a[0] = codes(word);
    a[1] = codes(word >> 4);
    a[2] = codes(word >> 8);
    a[3] = codes(__funnelshift_r(word, word, 12));
}
__device__ __forceinline__ void add(float (&acc)[4], const float (&d)[4], float low, float high) {
#pragma unroll
    for (int j = 0; j < 4; j++) acc[j] = __fmaf_rn(d[j], j < 2 ? low : high, acc[j]);
}
__device__ __forceinline__ u32 both(float low, float high) {  // as bf16
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ uint4 load16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint2 load8(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ u32 load4(u32 at) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void copy16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void landed() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}

// What two pairs' sums start from, for both halves of a slab. `zero` is 0, which the compiler does not know: else it
// would copy the four for every product and make that in place.
__device__ __forceinline__ void start(float (&c)[4], u32 at, u32 zero) {
    const uint2 v = load8(at);
    c[0] = __uint_as_float(v.x), c[1] = __uint_as_float(v.y);
    c[2] = __uint_as_float(v.x | zero), c[3] = __uint_as_float(v.y | zero);
}

// acc += scale * (a group's sum), of four slabs and N eights of pairs; x, c: the first eight's.
template <int N>
__device__ __forceinline__ void group(
    const u32 (&w)[8], const u32 (&s)[4], u32 x, u32 c, u32 zero, float (&acc)[N][4][4]) {
    u32 a[4][8];
    float low[4], high[4], d[4][4], from[2][4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
        unpack(a[q], w[2 * q]);
        unpack(a[q] + 4, w[2 * q + 1]);
        low[q] = __uint_as_float(s[q] << 16);
        high[q] = __uint_as_float(s[q] & 0xffff0000u);
    }
    uint4 b[2];
    b[0] = load16(x);
    start(from[0], c, zero);
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int now = k & 1, next = now ^ 1;
        if (k + 1 < N) {
            b[next] = load16(x + (k + 1) * 512);
            start(from[next], c + (k + 1) * 32, zero);
        }
        if (now == 0) asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");  // no more than two eights at a time
        mma(d[0], a[0], b[now].x, b[now].y, from[now]);
        mma(d[1], a[1], b[now].x, b[now].y, from[now]);
        if (k > 0)
#pragma unroll
            for (int q = 2; q < 4; q++) add(acc[k - 1][q], d[q], low[q], high[q]);
        mma(d[2], a[2], b[now].x, b[now].y, from[now]);
        mma(d[3], a[3], b[now].x, b[now].y, from[now]);
#pragma unroll
        for (int q = 0; q < 4; q++) mma(d[q], a[q] + 4, b[now].z, b[now].w, d[q]);
#pragma unroll
        for (int q = 0; q < 2; q++) add(acc[k][q], d[q], low[q], high[q]);
    }
#pragma unroll
    for (int q = 2; q < 4; q++) add(acc[N - 1][q], d[q], low[q], high[q]);
}

// A step: 64 columns, two groups. words, scales: this thread's, in shared memory.
template <int N>
__device__ __forceinline__ void step(u32 words, u32 scales, u32 x, u32 c, u32 zero, float (&acc)[N][4][4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 w[8], s[4];
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const uint2 v = load8(words + q * 512 + h * 8);
            w[2 * q] = v.x, w[2 * q + 1] = v.y;
            s[q] = load4(scales + q * 64 + h * 4);
        }
        group<N>(w, s, x + h * (PAIRS * 64), c + h * (PAIRS * 4), zero, acc);
    }
}
template <int N> __device__ __forceinline__ void clear(float (&acc)[N][4][4]) {
#pragma unroll
    for (int k = 0; k < N; k++)
#pragma unroll
        for (int i = 0; i < 16; i++) acc[k][i / 4][i % 4] = 0.0f;
}
__device__ __forceinline__ int eights(const int *pairs) {  // of a tile; every warp for itself
    const int lane = threadIdx.x & 31;
    const int n = __popc(__ballot_sync(~0u, pairs[lane] >= 0)) + __popc(__ballot_sync(~0u, pairs[lane + 32] >= 0));
    return (n + 7) / 8;
}
__device__ __forceinline__ u16 activated(float gate, float up) {
    float e, y;
    u16 out;
    asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(__fsub_rn(0.0f, gate), 1.4426950408889634f)));
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(gate), "f"(__fadd_rn(e, 1.0f)));
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(__fmul_rn(y, up)));
    return out;
}

// gate_up: eight warps, all 512 rows. Of x a row of 64 bytes for each pair and group, of the rest what each warp reads.
// The four chains' sums wait in shared memory.
constexpr int WORDS = PAIRS * 128, SCALES = WORDS + 8 * 2048, STARTS = SCALES + 8 * 256, STAGE = STARTS + PAIRS * 8;
constexpr int STAGES = 3, LIST = STAGES * STAGE, SUMS = LIST + 512;  // list: pairs, and where their rows of x begin

template <int N>
__device__ __forceinline__ void gate_up(
    u32 shared, char *room, const char *x, const char *starts, const char *words, const char *scales, u16 *hidden) {
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5, r = t >> 3;  // copies of rows r and r + 32
    const u32 zero = blockIdx.x >> 30, list = shared + LIST + PAIRS * 4;
    words += warp * (H / 256 * 8192) + lane * 16;
    scales += warp * (H / 256 * 1024) + lane * 16;
    int ahead = 0;  // which 64 columns are asked for next: 0, 4, 8 .. 108, 1, 5 ..
    auto ask = [&](int place) {
        const u32 at = shared + place * STAGE;
        const u32 to = at + (t & 4) * (PAIRS * 16) + r * 64 + (t & 3) * 16, column = ahead * 128 + (t & 7) * 16;
        if (r < N * 8) copy16(to, x + (load4(list + r * 4) + column));
        if (N > 4 && r + 32 < N * 8) copy16(to + 2048, x + (load4(list + 128 + r * 4) + column));
        if (t < 128 && (t & 63) < N * 8)
            copy4(at + STARTS + t * 4, starts + (load4(list + (t & 63) * 4) / 16 + ahead * 8 + (t >> 6) * 4));
        const char *from = words + ahead * 2048;
#pragma unroll
        for (int q = 0; q < 4; q++) copy16(at + WORDS + warp * 2048 + lane * 16 + q * 512, from + q * 512);
        if (lane < 16) copy16(at + SCALES + warp * 256 + lane * 16, scales + ahead * 256);
        ahead += 4;
        if (ahead >= STEPS) ahead -= STEPS - 1;
    };
    ask(0);
    commit();
    ask(1);
    commit();
    float *sums = (float *)(room + SUMS) + t;
    float acc[N][4][4];
    int at = 0;
#pragma unroll 1
    for (int chain = 0; chain < 4; chain++) {
        clear(acc);
#pragma unroll 1
        for (int i = 0; i < STEPS / 4; i++) {
            landed<1>();
            __syncthreads();
            ask(at == 0 ? STAGES - 1 : at - 1);  // the last two times in vain
            commit();
            const u32 stage = shared + at * STAGE;
            step(stage + WORDS + warp * 2048 + lane * 16, stage + SCALES + warp * 256 + (lane >> 2) * 8,
                 stage + lane * 16, stage + STARTS + (lane & 3) * 8, zero, acc);
            at = at == STAGES - 1 ? 0 : at + 1;
        }
#pragma unroll
        for (int k = 0; k < N; k++)
#pragma unroll
            for (int i = 0; i < 16; i++) {  // one by one: of four side by side the registers would have to be so
                float *sum = sums + (k * 16 + i) * 256;
                *sum = chain > 0 ? __fadd_rn(*sum, acc[k][i / 4][i % 4]) : acc[k][i / 4][i % 4];
            }
    }
    landed<0>();
    const int *pairs = (const int *)(room + LIST) + (lane & 3) * 2;
    hidden += warp * 32 + (lane >> 2);
#pragma unroll 1
    for (int k = 0; k < N; k++) {
        const int pa = pairs[k * 8], pb = pairs[k * 8 + 1];
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const float *sum = sums + (k * 16 + q * 4) * 256;  // gate of both, up of both
            if (pa >= 0) hidden[(long long)pa * INNER + q * 8] = activated(sum[0], sum[512]);
            if (pb >= 0) hidden[(long long)pb * INNER + q * 8] = activated(sum[256], sum[768]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 1) moe_many_gate_up(
    const char *x, const char *starts, const char *words, const char *scales, u16 *hidden, const int *expert,
    const int *pairs, const int *count) {
    extern __shared__ __align__(128) char room[];
    asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
    if (blockIdx.x >= *count) return;
    const u32 shared = (u32)__cvta_generic_to_shared(room);
    pairs += blockIdx.x * PAIRS;
    words += (long long)expert[blockIdx.x] * (2 * INNER * H / 2);
    scales += (long long)expert[blockIdx.x] * (2 * INNER * H / 16);
    const int n = eights(pairs);
    if (threadIdx.x < PAIRS) {
        const int pair = pairs[threadIdx.x];
        ((int *)(room + LIST))[threadIdx.x] = pair;
        ((u32 *)(room + LIST))[PAIRS + threadIdx.x] = (u32)(max(pair, 0) >> 3) * (H * 2);
    }
    __syncthreads();
    if (n > 7) gate_up<8>(shared, room, x, starts, words, scales, hidden);
    else if (n == 7) gate_up<7>(shared, room, x, starts, words, scales, hidden);
    else if (n == 6) gate_up<6>(shared, room, x, starts, words, scales, hidden);
    else if (n == 5) gate_up<5>(shared, room, x, starts, words, scales, hidden);
    else if (n == 4) gate_up<4>(shared, room, x, starts, words, scales, hidden);
    else if (n == 3) gate_up<3>(shared, room, x, starts, words, scales, hidden);
    else gate_up<2>(shared, room, x, starts, words, scales, hidden);
}

// down: four warps, which share hidden [8 groups, 64 pairs] and the starts of its sums; 14 times 256 rows a program.
constexpr int OWN = 14, BEGUN = PAIRS * 512, RING = BEGUN + PAIRS * 36, PLACES = 4, PLACE = 2048 + 256;

template <int N>
__device__ __forceinline__ void down(
    u32 shared, char *room, const char *hidden, const float *starts, const char *words, const char *scales, u32 *y,
    const int *given, int first) {
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    int *pairs = (int *)(room + BEGUN + PAIRS * 32);
    if (t < PAIRS) pairs[t] = given[t];
    __syncthreads();
    const u32 zero = blockIdx.x >> 30, mine = shared + RING + warp * (PLACES * PLACE);
#pragma unroll
    for (int i = 0; i < N * 2; i++) {  // a warp copies a row: 32 times 16 bytes
        const int r = i * 4 + warp;
        const char *from = hidden + (long long)max(pairs[r], 0) * (INNER * 2) + lane * 16;
        copy16(shared + (lane >> 2) * 4096 + r * 64 + (lane & 3) * 16, from);
    }
    if (t < N * 8) {
        const float4 *from = (const float4 *)(starts + (long long)max(pairs[t & 63], 0) * 8);
        const float4 v = from[0], u = from[1];
        float *to = (float *)(room + BEGUN) + t;
        to[0] = v.x, to[PAIRS] = v.y, to[2 * PAIRS] = v.z, to[3 * PAIRS] = v.w;
        to[4 * PAIRS] = u.x, to[5 * PAIRS] = u.y, to[6 * PAIRS] = u.z, to[7 * PAIRS] = u.w;
    }
    words += (long long)(first * 4 + warp) * 8192 + lane * 16;
    scales += (long long)(first * 4 + warp) * 1024 + lane * 16;
    auto ask = [&](int k) {  // a quarter of the columns of 64 rows
        const u32 to = mine + (k & 3) * PLACE + lane * 16;
        const char *from = words + (k >> 2) * 32768 + (k & 3) * 2048;
#pragma unroll
        for (int q = 0; q < 4; q++) copy16(to + q * 512, from + q * 512);
        if (lane < 16) copy16(to + 2048, scales + (k >> 2) * 4096 + (k & 3) * 256);
    };
    for (int k = 0; k < PLACES - 1; k++) {
        ask(k);
        commit();
    }
    landed<2>();
    __syncthreads();
    float acc[N][4][4];
#pragma unroll 1
    for (int i = 0; i < OWN; i++) {
        clear(acc);
#pragma unroll 1
        for (int j = 0; j < 4; j++) {
            landed<2>();
            __syncwarp();
            if (i * 4 + j + 3 < OWN * 4) ask(i * 4 + j + 3);
            commit();
            const u32 at = mine + j * PLACE;
            step(at + lane * 16, at + 2048 + (lane >> 2) * 8, shared + j * 8192 + lane * 16,
                 shared + BEGUN + (lane & 3) * 8 + j * 512, zero, acc);
        }
        u32 *to = y + ((first + i) * 4 + warp) * 32 + (lane >> 2);
#pragma unroll
        for (int k = 0; k < N; k++) {
            const int pa = pairs[k * 8 + (lane & 3) * 2], pb = pairs[k * 8 + (lane & 3) * 2 + 1];
            u32 *ya = to + (long long)pa * (H / 2), *yb = to + (long long)pb * (H / 2);
#pragma unroll
            for (int q = 0; q < 4; q++) {
                if (pa >= 0) ya[q * 8] = both(acc[k][q][0], acc[k][q][2]);
                if (pb >= 0) yb[q * 8] = both(acc[k][q][1], acc[k][q][3]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128, 2) moe_many_down(
    const char *hidden, const float *starts, const char *words, const char *scales, u32 *y, const int *expert,
    const int *pairs, const int *count) {
    extern __shared__ __align__(128) char room[];
    asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
    const int tile = blockIdx.x / 2, first = blockIdx.x % 2 * OWN;
    if (tile >= *count) return;
    const u32 shared = (u32)__cvta_generic_to_shared(room);
    pairs += tile * PAIRS;
    words += (long long)expert[tile] * (H * INNER / 2);
    scales += (long long)expert[tile] * (H * INNER / 16);
    const int n = eights(pairs);
    if (n > 7) down<8>(shared, room, hidden, starts, words, scales, y, pairs, first);
    else if (n == 7) down<7>(shared, room, hidden, starts, words, scales, y, pairs, first);
    else if (n == 6) down<6>(shared, room, hidden, starts, words, scales, y, pairs, first);
    else if (n == 5) down<5>(shared, room, hidden, starts, words, scales, y, pairs, first);
    else if (n == 4) down<4>(shared, room, hidden, starts, words, scales, y, pairs, first);
    else if (n == 3) down<3>(shared, room, hidden, starts, words, scales, y, pairs, first);
    else down<2>(shared, room, hidden, starts, words, scales, y, pairs, first);
}

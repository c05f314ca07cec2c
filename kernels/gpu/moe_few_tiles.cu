// The work list of up to 512 pairs, as expert_tiles (moe_tiles.py) makes it, in one program: a thread has a pair and an
// expert. Each expert has a bit a pair, so its pairs are counted, and stand in order, without a sum that waits.

typedef unsigned int u32;

constexpr int MOST = 512, WARPS = MOST / 32, HALF = 65536, WIDTH = 16;

// Of an expert with n pairs: pairs of a tile, as a power of two, and how often a tile stands there.
struct Cut {
    int power, copies;
    __device__ Cut(int n, int capacity, bool halves) {
        bool halved = halves && n > 1 << capacity;
        power = halved ? 3 : capacity;
        copies = halved ? 2 : 1;
    }
};

extern "C" __global__ void __launch_bounds__(MOST) moe_few_tiles(
    const int *__restrict__ chosen, int *__restrict__ expert, int *__restrict__ pairs, int *__restrict__ number,
    int total, int capacity, int halves) {  // capacity: as a power of two
    extern __shared__ u32 bits[];  // [words][MOST], then a number an expert, then one a warp
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, words = (total + 31) / 32;
    int *found = (int *)(bits + WARPS * MOST), *first = found + MOST, *sums = first + MOST;
    for (int w = 0; w < words; w++) bits[w * MOST + t] = 0;
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int e = t < total ? chosen[t] : -1;
    if (e >= 0) atomicOr(&bits[warp * MOST + e], 1u << lane);
    __syncthreads();
    int n = 0;
    for (int w = 0; w < words; w++) n += __popc(bits[w * MOST + t]);
    const Cut own(n, capacity, halves);
    const int size = 1 << own.power, tiles = (n + size - 1 >> own.power) * own.copies;
    int place = tiles;  // with those before it in the warp
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(~0u, place, step);
        if (lane >= step) place += other;
    }
    if (lane == 31) sums[warp] = place;
    __syncthreads();
    int before = __reduce_add_sync(~0u, lane < warp ? sums[lane % WARPS] : 0);
    place += before - tiles;
    found[t] = n;
    first[t] = place;
    if (t == MOST - 1) *number = place + tiles;
    __syncthreads();
    if (e >= 0) {
        int rank = __popc(bits[warp * MOST + e] & (1u << lane) - 1);
        for (int w = 0; w < warp; w++) rank += __popc(bits[w * MOST + e]);
        const Cut cut(found[e], capacity, halves);
        int *at = pairs + (first[e] + (rank >> cut.power) * cut.copies) * WIDTH + (rank & (1 << cut.power) - 1);
        at[0] = t;
        if (cut.copies == 2) at[WIDTH] = t;
    }
    for (int k = 0; k < tiles; k++) {  // their names, and what no pair fills
        expert[place + k] = own.copies == 2 ? t + HALF * (1 + k % 2) : t;
        const int left = min(n - (k / own.copies << own.power), size);
        int4 *line = (int4 *)(pairs + (place + k) * WIDTH);
        for (int q = 0; q < WIDTH / 4; q++) {
            if (4 * q >= left) line[q] = make_int4(-1, -1, -1, -1);
            else
                for (int i = 1; i < 4; i++)
                    if (4 * q + i >= left) ((int *)(line + q))[i] = -1;
        }
    }
}

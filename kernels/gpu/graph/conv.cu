/* Convolution of any shape of a graph as a matrix product on float32 units, its left matrix gathered in shared memory.
 *
 * Computes   out[i, g] = function(bias[g] + sum over d, f of x[i * stride + d * dilation - before, f] * weights[d, f, g]
 *            + addend[i, g]); outside of an image x is 0. x has the maps of all inputs one after the other; voxel j of
 *            an upsampled one is voxel (j + first) / factor in memory. With groups, an output sums over the maps of its
 *            own part of the inputs.
 * Shapes     inputs (z, y, x, f) float or half, any steps between voxels; weights (taps, f of a group, pitch) float,
 *            bias (pitch) float; out (z, y, x, f') in C order. `vectors`: four maps are written at once, `wide`: four
 *            weights are read at once.
 * Launch     128 threads: BM = VOX * 128 / COLS neighbouring voxels of the output, BN = MAPS * COLS of its maps; a
 *            thread sums VOX voxels of MAPS maps in registers. DEEP values of each voxel are staged at a time, twice in
 *            turns: the next are on their way from memory while products are summed. They are maps of one input at one
 *            tap, or with FLAT neighbours among all (tap, map), for one input of few maps: a table in shared memory
 *            says where each lies. grid (blocks of voxels, blocks of maps of all groups).
 *            Every LONGEST products sums go to totals, since long sums in float32 lose digits.
 *            softmax: a block takes all maps, once to compute the softmax's sum and, if there are more than BN, once
 *            more to write them.
 * Bound      arithmetic: VOX * MAPS products for VOX + MAPS reads of shared memory.
 * Source     Chetlur et al., cuDNN, 2014, 3; Volkov and Demmel 2008 (products from registers).
 * Tested     tests/kernels/gpu/graph/test_primitives.py
 */
#include "graph/functions.cuh"
#include "graph/inputs.cuh"
#include "graph/problem.cuh"

constexpr int THREADS = 128, DEEP = 8;  // as in conv.py
constexpr int LONGEST = 512;            // products summed in sequence
constexpr int OUTSIDE = -(1 << 29);     // a position from which no tap reaches an image

struct Entry {  // FLAT: one (tap, map)
    long long offset;
    int z, y, x;
};

/* The inputs that are staged: a tap, an input, and its maps f .. end - 1 that are left. */
struct Walk {
    Triple at;  // the tap
    int tap, part, f, end;

    DEVICE void enter(const Inputs& inputs, int part_, int group, int fin) {
        part = part_;
        const Input& in = inputs.parts[part];
        f = max(group * fin - in.first, 0);
        end = min((group + 1) * fin - in.first, in.maps);
    }
    /* Goes to the next maps; returns whether they are of another tap or input. */
    DEVICE bool advance(const Inputs& inputs, const Problem& p, int group) {
        f += DEEP;
        if (f < end) return false;
        do {
            if (part + 1 < p.inputs) {
                enter(inputs, part + 1, group, p.fin);
                continue;
            }
            ++tap;
            if (++at.x == p.k.x) at.x = 0, ++at.y;
            if (at.y == p.k.y) at.y = 0, ++at.z;
            enter(inputs, 0, group, p.fin);
        } while (f >= end);
        return true;
    }
};

template <class T, int BM, bool FLAT> struct Gatherer {
    static constexpr int VOXELS = BM > THREADS ? BM / THREADS : 1;  // of a thread
    static constexpr int UNITS = 2 * BM / THREADS;                  // of four values
    static constexpr int QUARTERS = UNITS / VOXELS;

    Triple origin[VOXELS];  // the first voxel of a window, possibly outside
    const T* from[VOXELS];  // null: outside
    float4 staged[UNITS];

    DEVICE static int quarter(int i) { return BM < THREADS ? threadIdx.x / BM : i; }
    DEVICE static int voxel(int v) { return BM < THREADS ? threadIdx.x % BM : threadIdx.x + v * THREADS; }

    DEVICE void begin(const Problem& p, long long m0) {
        const long long voxels = (long long)p.m.z * p.m.y * p.m.x;
#pragma unroll
        for (int v = 0; v < VOXELS; ++v) {
            const long long number = m0 + voxel(v);
            const Triple i = voxel_of(number, p.m);
            origin[v] = {i.z * p.stride.z - p.before.z, i.y * p.stride.y - p.before.y, i.x * p.stride.x - p.before.x};
            if (number >= voxels) origin[v].z = OUTSIDE;
        }
    }
    DEVICE static bool inside(int z, int y, int x, Triple n) {
        return (unsigned)z < (unsigned)n.z && (unsigned)y < (unsigned)n.y && (unsigned)x < (unsigned)n.x;
    }
    /* Points at the voxels that a tap reads of an input; with FLAT at those that the first tap would read. */
    DEVICE void point(const Inputs& inputs, const Problem& p, const Walk& walk, int group) {
        const Input& part = inputs.parts[FLAT ? 0 : walk.part];
#pragma unroll
        for (int v = 0; v < VOXELS; ++v) {
            int z = origin[v].z, y = origin[v].y, x = origin[v].x;
            if constexpr (FLAT) {
                from[v] = voxel_at<T>(part, z, y, x) + group * p.fin;
                continue;
            }
            z += walk.at.z * p.dilation.z, y += walk.at.y * p.dilation.y, x += walk.at.x * p.dilation.x;
            if (!inside(z, y, x, p.n)) {
                from[v] = nullptr;
                continue;
            }
            if (part.factor.z > 1) z = (z + p.first.z) / part.factor.z;
            if (part.factor.y > 1) y = (y + p.first.y) / part.factor.y;
            if (part.factor.x > 1) x = (x + p.first.x) / part.factor.x;
            from[v] = voxel_at<T>(part, z, y, x);
        }
    }
    /* Reads the next values: maps of a walk, or (tap, map) number k .. of a table of `count`. */
    DEVICE void fetch(const Inputs& inputs, const Problem& p, const Walk& walk, const Entry* table, int k, int count) {
#pragma unroll
        for (int v = 0; v < VOXELS; ++v)
#pragma unroll
            for (int i = 0; i < QUARTERS; ++i) {
                const int q = 4 * quarter(i);
                float4& to = staged[v * QUARTERS + i];
                if constexpr (FLAT) {
                    float values[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const Entry& e = table[min(k + q + j, count - 1)];
                        const bool known = k + q + j < count &&
                                           inside(origin[v].z + e.z, origin[v].y + e.y, origin[v].x + e.x, p.n);
                        values[j] = known ? load_activation(from[v] + e.offset) : 0.0f;
                    }
                    to = make_float4(values[0], values[1], values[2], values[3]);
                } else {
                    const int f = walk.f + q, known = from[v] == nullptr ? 0 : walk.end - f;
                    to = load_up_to_four(from[v] + f, known, inputs.parts[walk.part].wide);
                }
            }
    }
    DEVICE void store(float* tile) const {  // tile [DEEP][BM]
#pragma unroll
        for (int v = 0; v < VOXELS; ++v)
#pragma unroll
            for (int i = 0; i < QUARTERS; ++i) {
                float* const to = tile + 4 * quarter(i) * BM + voxel(v);
                const float4 values = staged[v * QUARTERS + i];
                to[0] = values.x, to[BM] = values.y, to[2 * BM] = values.z, to[3 * BM] = values.w;
            }
    }
};

/* Four neighbouring values in shared memory, and their products with those of another four rows. */
template <int COUNT> DEVICE void read(float (&to)[COUNT], const float* from, int apart) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i / 4 * apart);
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
}

template <class T, int VOX, int MAPS, int COLS, bool FLAT>
__global__ void __launch_bounds__(THREADS, MAPS == 8 ? 2 : 3)
    convolve(const __grid_constant__ Inputs inputs, const __grid_constant__ Problem p, const float* __restrict__ weights,
             const float* __restrict__ bias, const __grid_constant__ Input addend, T* __restrict__ out,
             long long vectors, float* peak) {
    constexpr int BM = VOX * THREADS / COLS, BN = MAPS * COLS, LANES = THREADS / COLS;
    EXTERN_SHARED(float, shared);  // tiles [2][DEEP][BM], weights [2][DEEP][BN], with FLAT a table [taps * fin]
    float* const tiles = shared;
    float* const right = shared + 2 * DEEP * BM;
    Entry* const table = reinterpret_cast<Entry*>(right + 2 * DEEP * BN);
    const int column = threadIdx.x % COLS, row = threadIdx.x / COLS;
    const int taps = p.k.z * p.k.y * p.k.x, count = taps * p.fin;
    const long long m0 = (long long)blockIdx.x * BM, voxels = (long long)p.m.z * p.m.y * p.m.x;
    static_assert(LANES * VOX == BM, "each thread has VOX voxels");
    if constexpr (FLAT) {
        const Input& part = inputs.parts[0];
        for (int e = threadIdx.x; e < count; e += THREADS) {
            const int tap = e / p.fin;
            const int z = tap / (p.k.y * p.k.x) * p.dilation.z, y = tap / p.k.x % p.k.y * p.dilation.y;
            const int x = tap % p.k.x * p.dilation.x;
            table[e] = {z * part.step_z + y * part.step_y + x * part.step_x + e % p.fin, z, y, x};
        }
        sync_block();
    }
    Gatherer<T, BM, FLAT> gatherer;
    gatherer.begin(p, m0);

    const bool soft = p.function == functions::SOFTMAX;
    const int blocks_of_group = (p.fout + BN - 1) / BN, blocks = soft ? p.groups * blocks_of_group : 1;
    Softmax state[VOX];
#pragma unroll
    for (int v = 0; v < VOX; ++v) state[v] = no_maps();
    float largest = 0.0f;
#pragma unroll 1
    for (int turn = 0; turn < (blocks > 1 ? 2 * blocks : 1); ++turn) {
        const bool writes = blocks == 1 || turn >= blocks;
        const int block = blockIdx.y + turn % blocks, group = block / blocks_of_group;
        const int g0 = block % blocks_of_group * BN;  // in the group
        const float* const columns = weights + group * p.fout + g0;

        Walk walk = {{0, 0, 0}, 0, 0, 0, 0};
        int steps = (count + DEEP - 1) / DEEP;
        if constexpr (!FLAT) {
            steps = 0;
            for (int part = p.inputs - 1; part >= 0; --part) {
                walk.enter(inputs, part, group, p.fin);
                if (walk.f < walk.end) steps += taps * ((walk.end - walk.f + DEEP - 1) / DEEP);
            }
            while (walk.f >= walk.end) walk.enter(inputs, walk.part + 1, group, p.fin);  // it has none of these maps
        }
        gatherer.point(inputs, p, walk, group);

        constexpr int RIGHT = BN / 4;  // fours of a row of weights
        const int right_k = threadIdx.x / RIGHT, right_g = 4 * (threadIdx.x % RIGHT);
        float4 weight = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const auto fetch = [&](int step) {
            gatherer.fetch(inputs, p, walk, table, step * DEEP, count);
            if (right_k >= DEEP) return;
            const int first = FLAT ? step * DEEP : walk.tap * p.fin + inputs.parts[walk.part].first + walk.f - group * p.fin;
            const int rows = FLAT ? count - first : walk.end - walk.f;
            const int known = right_k < rows ? p.fout - g0 - right_g : 0;
            weight = load_up_to_four(columns + (long long)(first + right_k) * p.pitch + right_g, known, p.wide);
        };
        const auto store = [&](int half) {
            gatherer.store(tiles + half * DEEP * BM);
            if (right_k < DEEP) *reinterpret_cast<float4*>(right + (half * DEEP + right_k) * BN + right_g) = weight;
        };

        float totals[VOX][MAPS], sums[VOX][MAPS];
#pragma unroll
        for (int g = 0; g < MAPS; ++g) {
            const int map = g0 + g / 4 * COLS * 4 + column * 4 + g % 4;
            const float start = map < p.fout ? bias[group * p.fout + map] : 0.0f;
#pragma unroll
            for (int v = 0; v < VOX; ++v) totals[v][g] = start, sums[v][g] = 0.0f;
        }
        fetch(0);
        store(0);
        sync_block();
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const bool more = step + 1 < steps;
            if (more) {
                if constexpr (!FLAT)
                    if (walk.advance(inputs, p, group)) gatherer.point(inputs, p, walk, group);
                fetch(step + 1);
            }
            const float* const left = tiles + step % 2 * DEEP * BM + row * VOX;
            const float* const down = right + step % 2 * DEEP * BN + column * 4;
#pragma unroll
            for (int k = 0; k < DEEP; ++k) {
                float in[VOX], w[MAPS];
                read(in, left + k * BM, 4);
                read(w, down + k * BN, COLS * 4);
#pragma unroll
                for (int v = 0; v < VOX; ++v)
#pragma unroll
                    for (int g = 0; g < MAPS; ++g) sums[v][g] += in[v] * w[g];
            }
            if (more) store((step + 1) % 2);
            if ((step + 1) % (LONGEST / DEEP) == 0 || !more) {
#pragma unroll
                for (int v = 0; v < VOX; ++v)
#pragma unroll
                    for (int g = 0; g < MAPS; ++g) totals[v][g] += sums[v][g], sums[v][g] = 0.0f;
            }
            sync_block();
        }

        // One voxel after the other, in a loop that turns the registers round, so that the code is there once.
#pragma unroll 1
        for (int v = 0; v < VOX; ++v) {
            float values[MAPS];
#pragma unroll
            for (int g = 0; g < MAPS; ++g) {
                values[g] = totals[0][g];
#pragma unroll
                for (int other = 1; other < VOX; ++other) totals[other - 1][g] = totals[other][g];
            }
            const long long number = m0 + row * VOX + v;
            const bool exists = number < voxels;
            if (addend.data != nullptr && exists) {
                const Triple at = voxel_of(number, p.m);
                const T* const from = voxel_at<T>(addend, at.z, at.y, at.x) + group * p.fout;
#pragma unroll
                for (int g = 0; g < MAPS; g += 4) {
                    const int map = g0 + g / 4 * COLS * 4 + column * 4;
                    const float4 more = load_up_to_four(from + map, p.fout - map, addend.wide);
                    values[g] += more.x, values[g + 1] += more.y, values[g + 2] += more.z, values[g + 3] += more.w;
                }
            }
            if (soft) {
                Softmax all = state[0];
#pragma unroll
                for (int other = 1; other < VOX; ++other) state[other - 1] = state[other];
                if (turn < blocks) {
                    Softmax mine = no_maps();
#pragma unroll
                    for (int g = 0; g < MAPS; g += 4) {
                        const float four[4] = {values[g], values[g + 1], values[g + 2], values[g + 3]};
                        mine = joined(mine, four, p.fout - (g0 + g / 4 * COLS * 4 + column * 4));
                    }
#pragma unroll
                    for (int mask = 1; mask < COLS; mask *= 2)
                        mine = joined(mine, {shuffle_xor(mine.largest, mask), shuffle_xor(mine.sum, mask)});
                    all = joined(all, mine);
                }
                state[VOX - 1] = all;
#pragma unroll
                for (int g = 0; g < MAPS; ++g) values[g] = of_all(all, values[g]);
            }
            apply_functions(values, p.function, p.a, p.b);
            if (!writes || !exists) continue;
            T* const to = out + number * p.groups * p.fout + group * p.fout;
#pragma unroll
            for (int g = 0; g < MAPS; g += 4) {
                const int map = g0 + g / 4 * COLS * 4 + column * 4;
                const float4 four = make_float4(values[g], values[g + 1], values[g + 2], values[g + 3]);
                store_up_to_four(to + map, four, p.fout - map, vectors);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (map + j < p.fout) largest = larger_magnitude(largest, values[g + j]);
            }
        }
    }
    raise_peak_by_warp(peak, largest);
}

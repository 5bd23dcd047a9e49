/* Convolutions and transposed convolutions of graphs as matrix products on float32 units, the left matrix gathered in
 * shared memory.
 *
 * Computes   TAPS, FLAT   out[i, g] = function(bias[g] + sum over d, f of x[i * stride + d * dilation - before, f] *
 *            weights[d, f, g] + addend[i, g]); outside of an image x is 0. x has the maps of all inputs one after the
 *            other; voxel j of an upsampled one is voxel (j + first) / factor in memory. With groups, an output sums over
 *            the maps of its own part of the inputs.
 *            PHASES   the transposed convolution out[j, g] = function(bias[g] + sum of x[i, f] * weights[d, f, g] over
 *            i, d with i * stride + d * dilation = j + first), for j + first = q * stride + phase: a convolution over q.
 *            COLUMNS  the same for kernels as large as the stride: out[q * stride + d - first, g] of all d is one product
 *            with weights (f, (d, g)).
 * Shapes     inputs (z, y, x, f) float or half, any steps between voxels; weights (taps, f of a group, pitch) float,
 *            bias (pitch) float; out (z, y, x, f') in C order. `vectors`: four maps are written at once, `wide`: four
 *            weights are read at once.
 * Launch     128 threads: BM = VOX * 128 / COLS neighbouring places, BN = MAPS * COLS maps; a thread sums VOX places of
 *            MAPS maps in registers. DEEP values of each place are staged at a time, twice in turns: the next are on
 *            their way from memory while products are summed. They are maps of one input at one tap, or with FLAT
 *            neighbours among all (tap, map), for one input of few maps: a table in shared memory says where each lies.
 *            grid (blocks of places, within these phases, within these blocks of maps of all groups): neighbours in the
 *            grid read the same inputs.
 *            Every LONGEST products sums go to totals, since long sums in float32 lose digits.
 *            softmax: a block takes all maps, once to compute the softmax's sum and, if there are more than BN, once
 *            more to write them. Not with COLUMNS.
 * Bound      arithmetic: VOX * MAPS products for VOX + MAPS reads of shared memory.
 * Source     Chetlur et al., cuDNN, 2014, 3; Volkov and Demmel 2008 (products from registers); Dumoulin and Visin 2016
 *            (transposed convolutions).
 * Tested     tests/kernels/gpu/graph/test_conv.py, test_transpose.py
 */
#include "graph/functions.cuh"
#include "graph/inputs.cuh"
#include "graph/problem.cuh"

constexpr int THREADS = 128, DEEP = 8;  // as in products.py
constexpr int LONGEST = 512;            // products summed in sequence
constexpr int OUTSIDE = -(1 << 29);     // a position from which no tap reaches an image
enum Kind { TAPS, FLAT, PHASES, COLUMNS };

struct Entry {  // FLAT: one (tap, map)
    long long offset;
    int z, y, x;
};

/* Taps of an output place along one axis: the first reads input `at`, each further one `step` voxels on. Their weights are
 * row, row + rows, ..
 */
struct Along {
    int count, at, step, row, rows;

    /* All taps of a convolution. */
    DEVICE static Along of_window(int k, int before, int dilation) { return {k, -before, dilation, 0, 1}; }
    /* The taps of a transposed convolution that reach a phase; place 0 is `q`. */
    DEVICE static Along of_phase(int k, int stride, int dilation, int phase, int q) {
        Along found = {0, 0, 0, 0, 1};
        for (int d = 0; d < k; ++d) {
            if ((phase - d * dilation) % stride != 0) continue;
            if (found.count == 0) found.row = d;
            if (found.count == 1) found.rows = d - found.row;
            ++found.count;
        }
        found.at = q + (phase - found.row * dilation) / stride;
        found.step = -found.rows * dilation / stride;
        return found;
    }
};

struct Taps {
    Along z, y, x;

    DEVICE int count() const { return z.count * y.count * x.count; }
    /* The row of weights of a tap, in taps of a kernel of ky * kx. */
    DEVICE int row(Triple tap, int ky, int kx) const {
        return ((z.row + tap.z * z.rows) * ky + y.row + tap.y * y.rows) * kx + x.row + tap.x * x.rows;
    }
};

/* The inputs that are staged: a tap, an input, and its maps f .. end - 1 that are left. */
struct Walk {
    Triple tap;
    int part, f, end;

    DEVICE void enter(const Inputs& inputs, int part_, int group, int fin) {
        part = part_;
        const Input& in = inputs.parts[part];
        f = max(group * fin - in.first, 0);
        end = min((group + 1) * fin - in.first, in.maps);
    }
    /* Goes to the next maps; returns whether they are of another tap or input. */
    DEVICE bool advance(const Inputs& inputs, const Problem& p, const Taps& taps, int group) {
        f += DEEP;
        if (f < end) return false;
        do {
            if (part + 1 < p.inputs) {
                enter(inputs, part + 1, group, p.fin);
                continue;
            }
            if (++tap.x == taps.x.count) tap.x = 0, ++tap.y;
            if (tap.y == taps.y.count) tap.y = 0, ++tap.z;
            enter(inputs, 0, group, p.fin);
        } while (f >= end);
        return true;
    }
};

template <class T, int BM, int KIND> struct Gatherer {
    static constexpr int VOXELS = BM > THREADS ? BM / THREADS : 1;  // of a thread
    static constexpr int UNITS = 2 * BM / THREADS;                  // of four values
    static constexpr int QUARTERS = UNITS / VOXELS;

    Triple origin[VOXELS];  // the first voxel of a window, possibly outside
    const T* from[VOXELS];  // null: outside
    float4 staged[UNITS];

    DEVICE static int quarter(int i) { return BM < THREADS ? threadIdx.x / BM : i; }
    DEVICE static int voxel(int v) { return BM < THREADS ? threadIdx.x % BM : threadIdx.x + v * THREADS; }

    DEVICE void begin(const Problem& p, const Taps& taps, long long m0) {
        const long long voxels = (long long)p.m.z * p.m.y * p.m.x;
#pragma unroll
        for (int v = 0; v < VOXELS; ++v) {
            const long long number = m0 + voxel(v);
            const Triple i = voxel_of(number, p.m);
            const Triple s = KIND == TAPS || KIND == FLAT ? p.stride : Triple{1, 1, 1};
            origin[v] = {i.z * s.z + taps.z.at, i.y * s.y + taps.y.at, i.x * s.x + taps.x.at};
            if (number >= voxels) origin[v].z = OUTSIDE;
        }
    }
    DEVICE static bool inside(int z, int y, int x, Triple n) {
        return (unsigned)z < (unsigned)n.z && (unsigned)y < (unsigned)n.y && (unsigned)x < (unsigned)n.x;
    }
    /* Points at the voxels that a tap reads of an input; with FLAT at those that the first tap would read. */
    DEVICE void point(const Inputs& inputs, const Problem& p, const Taps& taps, const Walk& walk, int group) {
        const Input& part = inputs.parts[KIND == FLAT ? 0 : walk.part];
#pragma unroll
        for (int v = 0; v < VOXELS; ++v) {
            int z = origin[v].z, y = origin[v].y, x = origin[v].x;
            if constexpr (KIND == FLAT) {
                from[v] = voxel_at<T>(part, z, y, x) + group * p.fin;
                continue;
            }
            z += walk.tap.z * taps.z.step, y += walk.tap.y * taps.y.step, x += walk.tap.x * taps.x.step;
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
                if constexpr (KIND == FLAT) {
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

/* The place of an output voxel of a transposed convolution in `out`; -1: outside. */
DEVICE long long voxel_in(const Problem& p, Triple q, int phase_z, int phase_y, int phase_x) {
    const int z = q.z * p.stride.z + phase_z + p.shift.z, y = q.y * p.stride.y + phase_y + p.shift.y;
    const int x = q.x * p.stride.x + phase_x + p.shift.x;
    const bool inside = (unsigned)z < (unsigned)p.out.z && (unsigned)y < (unsigned)p.out.y && (unsigned)x < (unsigned)p.out.x;
    return inside ? ((long long)z * p.out.y + y) * p.out.x + x : -1;
}

template <class T, int VOX, int MAPS, int COLS, int KIND>
__global__ void __launch_bounds__(THREADS, VOX * MAPS == 64 ? 2 : VOX * MAPS == 32 || COLS <= 2 ? 3 : 4)
    convolve(const __grid_constant__ Inputs inputs, const __grid_constant__ Problem p, const float* __restrict__ weights,
             const float* __restrict__ bias, const __grid_constant__ Input addend, T* __restrict__ out,
             long long vectors, float* peak) {
    constexpr int BM = VOX * THREADS / COLS, BN = MAPS * COLS;
    EXTERN_SHARED(float, shared);  // tiles [2][DEEP][BM], weights [2][DEEP][BN], with FLAT a table [taps * fin]; for softmax
                                   // [VOX][THREADS]
    float* const tiles = shared;
    float* const right = shared + 2 * DEEP * BM;
    Entry* const table = reinterpret_cast<Entry*>(right + 2 * DEEP * BN);
    const int column = threadIdx.x % COLS, row = threadIdx.x / COLS;
    const bool soft = p.function == functions::SOFTMAX;
    const int blocks_of_group = (p.fout + BN - 1) / BN, all_blocks = p.groups * blocks_of_group;
    const int blocks = soft ? all_blocks : 1;  // of this block of the grid
    const int first_block = soft ? 0 : blockIdx.x % all_blocks;
    unsigned tile = soft ? blockIdx.x : blockIdx.x / all_blocks;
    Triple phase = {0, 0, 0};
    if constexpr (KIND == PHASES) {
        phase.x = tile % p.stride.x, tile /= p.stride.x;
        phase.y = tile % p.stride.y, tile /= p.stride.y;
        phase.z = tile % p.stride.z, tile /= p.stride.z;
    }
    const long long m0 = (long long)tile * BM, voxels = (long long)p.m.z * p.m.y * p.m.x;
    Taps taps;
    if constexpr (KIND == PHASES)
        taps = {Along::of_phase(p.k.z, p.stride.z, p.dilation.z, phase.z, -p.before.z),
                Along::of_phase(p.k.y, p.stride.y, p.dilation.y, phase.y, -p.before.y),
                Along::of_phase(p.k.x, p.stride.x, p.dilation.x, phase.x, -p.before.x)};
    else
        taps = {Along::of_window(p.k.z, p.before.z, p.dilation.z), Along::of_window(p.k.y, p.before.y, p.dilation.y),
                Along::of_window(p.k.x, p.before.x, p.dilation.x)};
    const int count = taps.count() * p.fin;
    if constexpr (KIND == FLAT) {
        const Input& part = inputs.parts[0];
        for (int e = threadIdx.x; e < count; e += THREADS) {
            const int tap = e / p.fin;
            const int z = tap / (p.k.y * p.k.x) * p.dilation.z, y = tap / p.k.x % p.k.y * p.dilation.y;
            const int x = tap % p.k.x * p.dilation.x;
            table[e] = {z * part.step_z + y * part.step_y + x * part.step_x + e % p.fin, z, y, x};
        }
        sync_block();
    }
    Gatherer<T, BM, KIND> gatherer;
    gatherer.begin(p, taps, m0);

    Softmax* const states = reinterpret_cast<Softmax*>(table + (KIND == FLAT ? count : 0)) + threadIdx.x;
    for (int v = 0; v < VOX && soft; ++v) states[v * THREADS] = no_maps();
    float largest = 0.0f;
#pragma unroll 1
    for (int turn = 0; turn < (blocks > 1 ? 2 * blocks : 1); ++turn) {
        const bool writes = blocks == 1 || turn >= blocks;
        const int block = first_block + turn % blocks, group = block / blocks_of_group;
        const int g0 = block % blocks_of_group * BN;  // in the group
        const float* const columns = weights + group * p.fout + g0;

        Walk walk = {{0, 0, 0}, 0, 0, 0};
        int steps = (count + DEEP - 1) / DEEP;
        if constexpr (KIND != FLAT) {
            steps = 0;
            for (int part = p.inputs - 1; part >= 0; --part) {
                walk.enter(inputs, part, group, p.fin);
                if (walk.f < walk.end) steps += taps.count() * ((walk.end - walk.f + DEEP - 1) / DEEP);
            }
            while (walk.f >= walk.end) walk.enter(inputs, walk.part + 1, group, p.fin);  // it has none of these maps
        }
        gatherer.point(inputs, p, taps, walk, group);

        constexpr int RIGHT = BN / 4;  // fours of a row of weights
        const int right_k = threadIdx.x / RIGHT, right_g = 4 * (threadIdx.x % RIGHT);
        float4 weight = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const auto fetch = [&](int step) {
            gatherer.fetch(inputs, p, walk, table, step * DEEP, count);
            if (right_k >= DEEP) return;
            int first = step * DEEP, rows = count - first;
            if constexpr (KIND != FLAT) {
                const int map = inputs.parts[walk.part].first + walk.f - group * p.fin;
                first = taps.row(walk.tap, p.k.y, p.k.x) * p.fin + map, rows = walk.end - walk.f;
            }
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
        if (steps > 0) fetch(0), store(0);
        sync_block();
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const bool more = step + 1 < steps;
            if (more) {
                if constexpr (KIND != FLAT)
                    if (walk.advance(inputs, p, taps, group)) gatherer.point(inputs, p, taps, walk, group);
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
            const Triple at = voxel_of(number, p.m);
            if (addend.data != nullptr && exists) {
                const T* const from = voxel_at<T>(addend, at.z, at.y, at.x) + group * p.fout;
#pragma unroll
                for (int g = 0; g < MAPS; g += 4) {
                    const int map = g0 + g / 4 * COLS * 4 + column * 4;
                    const float4 more = load_up_to_four(from + map, p.fout - map, addend.wide);
                    values[g] += more.x, values[g + 1] += more.y, values[g + 2] += more.z, values[g + 3] += more.w;
                }
            }
            if (soft) {
                Softmax all = states[v * THREADS];
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
                    all = states[v * THREADS] = joined(all, mine);
                }
#pragma unroll
                for (int g = 0; g < MAPS; ++g) values[g] = of_all(all, values[g]);
            }
            apply_functions(values, p.function, p.a, p.b);
            if (!writes || !exists) continue;
            const int maps = KIND == COLUMNS ? p.channels : p.groups * p.fout;
            const long long voxel = KIND == PHASES ? voxel_in(p, at, phase.z, phase.y, phase.x) : number;
            if (voxel < 0) continue;
#pragma unroll
            for (int g = 0; g < MAPS; g += 4) {
                const int map = g0 + g / 4 * COLS * 4 + column * 4;
                if constexpr (KIND == COLUMNS) {
#pragma unroll
                    for (int j = 0; j < 4; j += 1) {
                        const int tap = (map + j) / p.channels;
                        const long long there =
                            voxel_in(p, at, tap / (p.stride.y * p.stride.x), tap / p.stride.x % p.stride.y, tap % p.stride.x);
                        if (map + j >= p.fout || there < 0) continue;
                        T* const to = out + there * maps + (map + j) % p.channels;
                        if (vectors) {
                            store_activation4(to, make_float4(values[g], values[g + 1], values[g + 2], values[g + 3]));
#pragma unroll
                            for (int other = 0; other < 4; ++other)
                                largest = larger_magnitude(largest, values[g + other]);
                            break;
                        }
                        store_activation(to, values[g + j]);
                        largest = larger_magnitude(largest, values[g + j]);
                    }
                    continue;
                }
                const float4 four = make_float4(values[g], values[g + 1], values[g + 2], values[g + 3]);
                store_up_to_four(out + voxel * maps + group * p.fout + map, four, p.fout - map, vectors);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (map + j < p.fout) largest = larger_magnitude(largest, values[g + j]);
            }
        }
    }
    raise_peak_by_warp(peak, largest);
}

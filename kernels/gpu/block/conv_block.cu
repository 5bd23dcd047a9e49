/* Direct convolution of many input maps by stride-fixed blocks, on float32 units.
 *
 * Computes   out[s, i, g] = activation(bias[g] + sum over d, f of x[s, i + d, f] * kernels[d, f, g])
 * Shapes     x (S, n, f), out (S, n - k + 1, f') float or half, images in C order, any number of values apart; f in
 *            whole QUADs, f' in blocks of MAPS. The taps (dz, dy) are processed in pieces of `span` along x, and those
 *            in segments of SEGMENT maps f; the last piece and segment may be shorter. kernels [f' /
 *            MAPS][dz][dy][piece][segment][dx of the piece][f of the segment][MAPS] float, bias (padded f') float.
 * Launch     128 threads: VOXELS output voxels, a tile of wide x lines x planes, and MAPS maps. A step is one segment
 *            of one piece: SEGMENT maps of its input voxels and its kernels, which are copied to shared memory while
 *            the previous step is summed. Thread 8 v + m sums voxels v, v + 16, ... and maps m WIDTH + (0 .. WIDTH),
 *            ...
 *            grid (blocks of maps, tiles along x, y, z, images), the first fastest, as one number.
 *            LONG sums are cut: after every `together` steps a thread adds its sums to its voxels and maps of out,
 *            which no other thread reads or writes, and starts from 0. No register holds a second sum. The bias comes
 *            last: small terms added to it would be rounded more.
 * Bound      arithmetic (float32 units): VOXELS / 16 * MAPS / 8 products for VOXELS / 64 + MAPS / 8 / WIDTH reads of 16
 *            bytes of shared memory, 64 for 4 at VOXELS = 128, MAPS = 64.
 * Source     Chang, Onishi, Maruyama, Fast convolution kernels on Pascal GPU with high memory efficiency, 3.2. There a
 *            segment runs along one filter, whose maps are adjacent in memory; with channels last, the maps of a voxel
 *            are.
 * Tested     tests/kernels/gpu/block/test_primitive.py
 */
#include "activation.cuh"

constexpr int THREADS = 128;                             // as in block/primitive.py
constexpr int MAP_LANES = 8, VOXEL_LANES = THREADS / MAP_LANES;
constexpr int QUAD = 4;                                  // input maps read at a time, as in block/primitive.py

/* Values from one staged voxel to the next: aligned to 16 bytes, and four neighbouring voxels do not conflict in a
 * bank.
 */
template <class T, int SEGMENT> constexpr int PITCH = SEGMENT + (SEGMENT * sizeof(T) % 64 ? 0 : 16 / sizeof(T));

/* An input voxel of a tile, at the first tap. */
struct Place {
    long long at;  // offset in its image, in values, as if all planes were there
    int x, z;      // z: -1 if no output needs it
};

/* The start of a block; g: its first map. Kept in shared memory, because the registers are for sums. */
struct Origin {
    long long s, z, y, x;
    int g;
};

/* The position of a block's results in an image of the output. */
struct Part {
    const Origin& begin;
    long long mz, my, mx, maps, wide, lines;
    /* The offset of the maps of a voxel of the block, in values; -1: it is outside. */
    DEVICE long long maps_of(int voxel) const {
        const int row = voxel / (int)wide;
        const long long z = begin.z + row / lines, y = begin.y + row % lines, x = begin.x + voxel % wide;
        return z < mz && y < my && x < mx ? ((z * my + y) * mx + x) * maps : -1;
    }
};

struct Sizes {
    long long carried, ny, nx, fin;
    int ky, kx, span;
};

/* The start of this block: maps vary first, then tiles of `planes` planes, then images. */
template <int MAPS> DEVICE Origin begin_of(long long planes, const Part& part) {
    const int tiles_x = (part.mx + part.wide - 1) / part.wide, tiles_y = (part.my + part.lines - 1) / part.lines;
    const int tiles_z = (part.mz + planes - 1) / planes, map_blocks = (part.maps + MAPS - 1) / MAPS;
    const int tile = blockIdx.x / map_blocks, row = tile / tiles_x, plane = row / tiles_y;
    return {plane / tiles_z, plane % tiles_z * planes, row % tiles_y * part.lines, tile % tiles_x * part.wide,
            (int)blockIdx.x % map_blocks * MAPS};
}

/* `starts`: offsets of the tile's staged voxels, in values, with `columns` to a row and SPACING from one to the next;
 * `places`: all `staged` voxels, filled once the start of the block is known, which `part` refers to.
 */
template <int VOXELS, int MAPS, int SPACING>
DEVICE void locate(Origin& begin, int* starts, Place* places, int staged, int columns, const Part& part,
                   const Sizes& n) {
    const int wide = (int)part.wide;
    if (threadIdx.x == 0) begin = begin_of<MAPS>(VOXELS / (int)(part.wide * part.lines), part);
    for (int i = threadIdx.x; i < VOXELS; i += THREADS) starts[i] = (i / wide * columns + i % wide) * SPACING;
    sync_block();
    for (int i = threadIdx.x; i < staged; i += THREADS) {
        const int row = i / columns, column = i % columns;
        const long long z = begin.z + row / part.lines, y = begin.y + row % part.lines;
        places[i].at = ((z * n.ny + y) * n.nx + begin.x + column) * n.fin;
        places[i].x = begin.x + column;
        places[i].z = z < part.mz && y < part.my ? z : -1;
    }
}

/* The taps and maps of a step: segments vary first, then pieces, rows and planes of taps. */
struct Taps {
    int dz = 0, dy = 0, dx = 0, first = 0;
    DEVICE int taps(const Sizes& n) const { return min(n.span, n.kx - dx); }
    template <int SEGMENT> DEVICE int quads(const Sizes& n) const {
        return (min((long long)SEGMENT, n.fin - first) + QUAD - 1) / QUAD;
    }
    template <int SEGMENT> DEVICE void advance(const Sizes& n) {
        if ((first += SEGMENT) < n.fin) return;
        first = 0;
        if ((dx += n.span) < n.kx) return;
        dx = 0;
        if (++dy < n.ky) return;
        dy = 0;
        ++dz;
    }
};

/* Stages the step's maps of all its voxels: QUADs beyond the maps and unused voxels become zeros. */
template <class T, int SEGMENT, int BYTES>
DEVICE void stage_voxels(T* to, const T* before, const T* x, const Place* places, int voxels, const Taps& step,
                         const Sizes& n) {
    constexpr int UNIT = BYTES / sizeof(T), UNITS = SEGMENT / UNIT;
    const long long shift = ((step.dz * n.ny + step.dy) * n.nx + step.dx) * n.fin + step.first;
    const int filled = step.quads<SEGMENT>(n) * QUAD;
#pragma unroll 1
    for (int unit = threadIdx.x; unit < voxels * UNITS; unit += THREADS) {
        const int f = unit % UNITS * UNIT;
        if (f >= filled) continue;
        const Place place = places[unit / UNITS];
        const bool there = place.z >= 0 && place.x + step.dx < n.nx && step.first + f < n.fin;
        const T* const image = place.z + step.dz < n.carried ? before : x;
        const T* const from = image + place.at + shift + f;
        T* const target = to + unit / UNITS * PITCH<T, SEGMENT> + f;
        if constexpr (BYTES < 4)
            store_activation(target, there ? load_activation(from) : 0.0f);
        else
            cp_async<BYTES>(target, there ? from : image, there);
    }
}

/* Stages a step's kernels; returns the number of values, which is the offset of the next step's. */
template <int MAPS> DEVICE int stage_kernels(float* to, const float* from, int quads) {
    const int count = quads * QUAD * MAPS;
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < count; i += 4 * THREADS) cp_async<16>(to + i, from + i);
    return count;
}

/* WIDTH neighbouring values of shared memory. */
template <int WIDTH> DEVICE void read(float* to, const float* from) {
    if constexpr (WIDTH == 4) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
        const float2 two = *reinterpret_cast<const float2*>(from);
        to[0] = two.x, to[1] = two.y;
    }
}
template <int WIDTH> DEVICE void read(float* to, const half* from) {
    static_assert(WIDTH == 4, "kernels, which are read two at a time, are float");
    const uint2 bits = *reinterpret_cast<const uint2*>(from);
    const float2 low = to_float2(half2_from_bits(bits.x)), high = to_float2(half2_from_bits(bits.y));
    to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
}

template <int ROWS, int COLUMNS> DEVICE void clear(float (&sums)[ROWS][COLUMNS]) {
#pragma unroll
    for (int v = 0; v < ROWS; ++v)
#pragma unroll
        for (int g = 0; g < COLUMNS; ++g) sums[v][g] = 0.0f;
}

/* `bias` starts at this thread's first map. */
template <int VOXELS, int MAPS, int WIDTH>
DEVICE void add_bias(float (&sums)[VOXELS / VOXEL_LANES][MAPS / MAP_LANES], const float* bias) {
#pragma unroll
    for (int g = 0; g < MAPS / MAP_LANES; g += WIDTH)
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float start = bias[g * MAP_LANES + i];
#pragma unroll
            for (int v = 0; v < VOXELS / VOXEL_LANES; ++v) sums[v][g + i] += start;
        }
}

/* Adds one step; `at`: offsets of this thread's staged voxels, in values; `kernels` starts at its first map. */
template <class T, int SEGMENT, int VOXELS, int MAPS, int WIDTH>
DEVICE void add_step(float (&sums)[VOXELS / VOXEL_LANES][MAPS / MAP_LANES], const T* tile, const float* kernels,
                     const int (&at)[VOXELS / VOXEL_LANES], int taps, int quads) {
    constexpr int MINE = VOXELS / VOXEL_LANES, MY_MAPS = MAPS / MAP_LANES;
#pragma unroll 1
    for (int dx = 0; dx < taps; ++dx, tile += PITCH<T, SEGMENT>) {
#pragma unroll 1
        for (int quad = 0; quad < quads; ++quad, kernels += QUAD * MAPS) {
            float in[MINE][QUAD];
#pragma unroll
            for (int v = 0; v < MINE; ++v) read<QUAD>(in[v], tile + at[v] + quad * QUAD);
#pragma unroll
            for (int f = 0; f < QUAD; ++f) {
                if (f == QUAD / 2 && MINE * MY_MAPS > 64) sync_warp();  // otherwise earlier reads find no registers
                float w[MY_MAPS];
#pragma unroll
                for (int g = 0; g < MY_MAPS; g += WIDTH) read<WIDTH>(w + g, kernels + f * MAPS + g * MAP_LANES);
#pragma unroll
                for (int v = 0; v < MINE; ++v)
#pragma unroll
                    for (int g = 0; g < MY_MAPS; ++g) sums[v][g] += in[v][f] * w[g];
            }
        }
    }
}

/* Adds what this thread wrote before to its sums. */
template <int VOXELS, int MAPS, int WIDTH>
DEVICE void add_written(float (&sums)[VOXELS / VOXEL_LANES][MAPS / MAP_LANES], const float* image, const Part& part) {
    const int g0 = part.begin.g + threadIdx.x % MAP_LANES * WIDTH;
#pragma unroll
    for (int v = 0; v < VOXELS / VOXEL_LANES; ++v) {
        sync_warp();  // as in `write`
        const long long at = part.maps_of(v * VOXEL_LANES + threadIdx.x / MAP_LANES);
        const float* const from = image + at + g0;
#pragma unroll
        for (int g = 0; g < MAPS / MAP_LANES; g += WIDTH) {
            const int known = at >= 0 ? (int)part.maps - g0 - g * MAP_LANES : 0;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (i < known) sums[v][g + i] += from[g * MAP_LANES + i];
        }
    }
}

/* Applies the activation and writes this thread's sums; returns the largest magnitude. */
template <class T, int VOXELS, int MAPS, int WIDTH, int KIND, bool VECTORS>
DEVICE float write(T* image, const float (&sums)[VOXELS / VOXEL_LANES][MAPS / MAP_LANES], const Part& part) {
    const int g0 = part.begin.g + threadIdx.x % MAP_LANES * WIDTH;
    float largest = 0.0f;
#pragma unroll
    for (int v = 0; v < VOXELS / VOXEL_LANES; ++v) {
        sync_warp();  // one voxel after the other: the registers hold no more addresses
        const long long at = part.maps_of(v * VOXEL_LANES + threadIdx.x / MAP_LANES);
        T* const to = image + at + g0;
#pragma unroll
        for (int g = 0; g < MAPS / MAP_LANES; g += WIDTH) {
            const int known = at >= 0 ? (int)part.maps - g0 - g * MAP_LANES : 0;
            float value[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                value[i] = activate<KIND>(sums[v][g + i]);
                if (i < known) largest = larger_magnitude(largest, value[i]);
            }
            T* const there = to + g * MAP_LANES;
            if constexpr (VECTORS) {
                if (known <= 0) continue;
                if constexpr (WIDTH == 4)
                    store_activation4(there, make_float4(value[0], value[1], value[2], value[3]));
                else
                    store_activation2(there, make_float2(value[0], value[1]));
            } else {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i)
                    if (i < known) store_activation(there + i, value[i]);
            }
        }
    }
    return largest;
}

/* Writes the sums so far, plus what was `written`, to the output without activation, and restarts from 0. */
template <int VOXELS, int MAPS, int WIDTH, bool VECTORS>
DEVICE void restart_sums(float* image, float (&sums)[VOXELS / VOXEL_LANES][MAPS / MAP_LANES], const Part& part,
                       bool written) {
    if (written) add_written<VOXELS, MAPS, WIDTH>(sums, image, part);
    write<float, VOXELS, MAPS, WIDTH, NONE, VECTORS>(image, sums, part);
    clear(sums);
}

/* BYTES: of a copy of inputs, as all addresses and the number of maps allow. KIND: the activation. VECTORS: four maps
 * may be written at once. LONG: only `together` steps are summed at a time.
 */
template <class T, int SEGMENT, int VOXELS, int MAPS, int BYTES, int KIND, bool VECTORS, bool LONG>
__global__ void __launch_bounds__(THREADS, 3)
    block(const T* before, long long before_image, const T* x, long long x_image, T* out, long long out_image,
          const float* kernels, const float* bias, long long carried, long long ny, long long nx, long long fin,
          long long mz, long long my, long long mx, long long maps, long long kz, long long ky, long long kx,
          long long span, long long wide, long long lines, long long together, float* peak) {
    constexpr int MINE = VOXELS / VOXEL_LANES, MY_MAPS = MAPS / MAP_LANES, WIDTH = MAPS % 32 ? 2 : 4;
    EXTERN_SHARED(Place, places);  // for all staged voxels; then twice: the voxels, a step's kernels
    const Sizes n = {carried, ny, nx, fin, (int)ky, (int)kx, (int)span};
    const int columns = (int)wide + (int)span - 1, staged = VOXELS / (int)wide * columns;
    const int tile_bytes = staged * PITCH<T, SEGMENT> * (int)sizeof(T);
    const int buffer_bytes = tile_bytes + (int)span * SEGMENT * MAPS * (int)sizeof(float);
    unsigned char* const buffers = reinterpret_cast<unsigned char*>(places + staged);

    SHARED(Origin, origins, [1]);
    SHARED(int, starts, [VOXELS]);
    const Origin& begin = origins[0];
    const Part part = {begin, mz, my, mx, maps, wide, lines};
    locate<VOXELS, MAPS, PITCH<T, SEGMENT>>(origins[0], starts, places, staged, columns, part, n);
    const long long padded = (fin + QUAD - 1) / QUAD * QUAD;
    const float* coming = kernels + begin.g * kz * ky * kx * padded;

    const int group = threadIdx.x / MAP_LANES, mine = threadIdx.x % MAP_LANES * WIDTH;
    float sums[MINE][MY_MAPS];
    clear(sums);
    sync_block();

    T* const image = out + begin.s * out_image;
    Taps next;
    int taps = 0, quads = 0;
    long long left = together + 1;  // rounds until sums are written; the first round has none
    bool written = false;
#pragma unroll 1
    for (int buffer = 0;; buffer ^= 1) {  // this round's step is copied while the previous one is summed
        const bool more = next.dz < kz;
        const int next_taps = next.taps(n), next_quads = next.quads<SEGMENT>(n);
        unsigned char* const to = buffers + buffer * buffer_bytes;
        if (more) {
            stage_voxels<T, SEGMENT, BYTES>(reinterpret_cast<T*>(to), before + begin.s * before_image,
                                            x + begin.s * x_image - carried * ny * nx * fin, places, staged, next, n);
            coming += stage_kernels<MAPS>(reinterpret_cast<float*>(to + tile_bytes), coming, next_taps * next_quads);
            next.advance<SEGMENT>(n);
        }
        cp_async_commit();
        const unsigned char* const from = buffers + (buffer ^ 1) * buffer_bytes;
        const float* const ready = reinterpret_cast<const float*>(from + tile_bytes) + mine;
        int at[MINE];
#pragma unroll
        for (int v = 0; v < MINE; ++v) at[v] = starts[v * VOXEL_LANES + group];
        add_step<T, SEGMENT, VOXELS, MAPS, WIDTH>(sums, reinterpret_cast<const T*>(from), ready, at, taps, quads);
        if (!more) break;
        if constexpr (LONG)
            if (--left == 0) {
                restart_sums<VOXELS, MAPS, WIDTH, VECTORS>(image, sums, part, written);
                written = true, left = together;
            }
        taps = next_taps, quads = next_quads;
        cp_async_wait<0>();
        sync_block();
    }

    if constexpr (LONG)
        if (written) add_written<VOXELS, MAPS, WIDTH>(sums, image, part);
    add_bias<VOXELS, MAPS, WIDTH>(sums, bias + begin.g + mine);
    const float largest = write<T, VOXELS, MAPS, WIDTH, KIND, VECTORS>(image, sums, part);
    raise_peak_by_warp(peak, largest);
}

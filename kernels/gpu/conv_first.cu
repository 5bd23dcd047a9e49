/* Convolution of few input maps: the first layer of a network, whose output is many times larger than its input.
 *
 * Computes   out[s, i, g] = activation(bias[g] + sum over d, f of x[s, i + d, f] * kernels[d, f, g])
 * Shapes     x (S, n, FIN), out (S, n - k + 1, f') float or half, images in C order, any number of values apart. The
 *            taps (dz, dy) are processed in chunks of whole rows, so that inputs and kernels of a chunk fit shared
 *            memory:
 *            plain   kernels [maps / (16 GROUPS)][dz, dy][f][dx][16 GROUPS] float;
 *            tensor  kernels [maps / (16 GROUPS)][chunk][8 taps][GROUPS][lane] as float4 of tf32, a chunk's taps (dz,
 *                    dy, f, dx) padded with zeros to whole eights: word 2 i + h of lane 4 c + t is tap t + 4 h of map 4
 *                    (c / 2) + 2 i + c % 2 of the group, so that a lane ends with four neighbouring maps.
 * Launch     192 threads: a tile of 192 output voxels, `wide` along x, 32 a warp, and 16 GROUPS maps, one z after
 *            another. Lane 4 g + t sums maps 16 c + 4 t + (0..3) of four voxels: plain 4 g + (0..3), tensor g + 8
 *            (0..3).
 *            grid (tiles, blocks of maps, images).
 *            AHEAD: the data of the next chunk, or the next z, are loaded while this one is multiplied. One chunk: its
 *            kernels stay, and planes form a ring of one more than the kernel has, so that the next z needs one plane.
 *            Several: two buffers of kernels, planes and offsets alternate. float units get inputs by cp.async; for
 *            tensor units, which need them rounded, and as float, they pass through registers: at most AT_ONCE a
 *            thread.
 * Bound      plain: arithmetic from k = 3 on (float32 units), below it the writing of out; tensor: writing up to k = 5.
 * Source     Chang, Onishi, Maruyama, Fast convolution kernels on Pascal GPU with high memory efficiency, 3.1 (input
 *            tile in shared memory, division of the filters); matrix fragments: PTX ISA, mma.m16n8k8.
 * Tested     tests/kernels/gpu/test_conv_first.py
 */
#include "activation.cuh"

constexpr int THREADS = 192, WARPS = THREADS / WARP, TILE = 192;  // 168 registers for two blocks; as in conv_first.py
constexpr int GROUP = 16;                                        // maps, as in conv_first.py
constexpr int HEAD = 32;                                         // floats, for Sizes, as in conv_first.py
constexpr int AT_ONCE = 8;                                       // inputs of a thread in flight
constexpr int LANE = 4;                                          // voxels and neighbouring maps of a lane

/* Kept in shared memory, so that values derived from it are recomputed where needed: the registers are for sums. */
struct Sizes {
    int carried, ny, nx, my, mx, maps, ky, kx, wide;
    int lines, pitch, plane;   // lines of a plane of the tile, floats from one to the next, floats of a plane for one f
    int x0, y0, z_end;         // position of the block
    int all_rows, rows, chunks, kernel_floats;
    int planes, slots;         // planes of a chunk at most; planes that fit the tile
    const void *before, *x;    // the block's image, as if all planes were in both
    int columns, step_lines, step_columns;  // strides of Cursor: values in a tile line, and THREADS of them
};

/* Stages planes first .. first + count of one image, from (y, x) on, in tile [plane][f][lines][pitch]; zeros outside.
 */
template <class T, int FIN, bool TENSOR>
DEVICE void stage_planes(float* tile, const T* before, const T* x, int first, int count, const Sizes& n) {
    const int columns = (n.wide + n.kx - 1) * FIN, all = count * n.lines * columns;
#pragma unroll 1
    for (int start = threadIdx.x; start < all; start += THREADS * AT_ONCE) {
        float values[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {  // all are in flight before the first is waited for
            const int line = (start + i * THREADS) / columns, e = (start + i * THREADS) % columns;
            const int z = first + line / n.lines, y = n.y0 + line % n.lines;
            const bool inside = line < count * n.lines && y < n.ny && n.x0 + e / FIN < n.nx;
            const T* const from = (z < n.carried ? before : x) + (((long long)z * n.ny + y) * n.nx + n.x0) * FIN;
            values[i] = inside ? load_activation(from + e) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int line = (start + i * THREADS) / columns, e = (start + i * THREADS) % columns;
            if (line >= count * n.lines) break;
            float* const to = tile + (line / n.lines * FIN + e % FIN) * n.plane + line % n.lines * n.pitch;
            to[e / FIN] = TENSOR ? from_bits(to_tf32(values[i])) : values[i];
        }
    }
}

/* Iterates over planes first .. first + count of an image that are loaded ahead, value by value in memory order,
 * THREADS at a time: only the first needs a division. TILE is THREADS, so that no step passes more than one plane.
 */
template <class T, int FIN> struct Cursor {
    const T *before, *x;
    int first, count;
    const Sizes& n;
    int plane = 0, y = threadIdx.x / n.columns, e = threadIdx.x % n.columns;
    DEVICE bool goes_on() const { return plane < count; }
    DEVICE bool inside() const { return n.y0 + y < n.ny && n.x0 + e / FIN < n.nx; }
    DEVICE const T* from() const {
        const int z = first + plane;
        return (z < n.carried ? before : x) + (((long long)z * n.ny + n.y0 + y) * n.nx + n.x0) * FIN + e;
    }
    DEVICE float* to(float* tile) const { return tile + (plane * FIN + e % FIN) * n.plane + y * n.pitch + e / FIN; }
    DEVICE void advance() {
        y += n.step_lines, e += n.step_columns;
        if (e >= n.columns) e -= n.columns, ++y;
        if (y >= n.lines) y -= n.lines, ++plane;
    }
};

/* Copies planes asynchronously by cp.async. */
template <int FIN> DEVICE void copy_planes(float* tile, Cursor<float, FIN> cursor) {
#pragma unroll 1
    for (; cursor.goes_on(); cursor.advance()) {
        const bool inside = cursor.inside();
        cp_async<4>(cursor.to(tile), inside ? cursor.from() : cursor.x, inside);
    }
}

/* Loads planes into registers: the values are not used before `store_planes`, which would wait for them. */
template <class T, int FIN> DEVICE void load_planes(T (&values)[AT_ONCE], Cursor<T, FIN> cursor) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i, cursor.advance()) {
        if (!cursor.goes_on()) break;
        values[i] = cursor.inside() ? *cursor.from() : T{};
    }
}

template <bool TENSOR, class T, int FIN>
DEVICE void store_planes(float* tile, const T (&values)[AT_ONCE], Cursor<T, FIN> cursor) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i, cursor.advance()) {
        if (!cursor.goes_on()) break;
        *cursor.to(tile) = TENSOR ? from_bits(to_tf32(to_float(values[i]))) : to_float(values[i]);
    }
}

/* The voxel of the tile that this lane sums as its v-th. */
template <bool TENSOR> DEVICE int voxel_of(int v) {
    const int lane = threadIdx.x % WARP;
    return threadIdx.x / WARP * WARP + (TENSOR ? lane / 4 + 8 * v : LANE * (lane / 4) + v);
}

/* Rows begin .. begin + count of the taps, which need `planes` of the input from `plane` on. */
struct Chunk {
    int number, begin, count, plane, planes;
    DEVICE Chunk(int chunk, const Sizes& n) : number(chunk), begin(chunk * n.rows) {
        count = min(n.rows, n.all_rows - begin);
        plane = begin / n.ky, planes = (begin + count - 1) / n.ky - plane + 1;
    }
};

/* Starts copies of a chunk's kernels, and fills `offsets` with the places of its taps in the tile, for tensor units. */
template <int FIN, int GROUPS, bool TENSOR>
DEVICE void stage_kernels(float* to, unsigned short* offsets, const float* kernels, const Chunk& chunk, const Sizes& n) {
    const int taps = chunk.count * FIN * n.kx, row_floats = GROUP * GROUPS * FIN * n.kx;
    const float* const from =
        TENSOR ? kernels + ((long long)blockIdx.y * n.chunks + chunk.number) * n.kernel_floats
               : kernels + ((long long)blockIdx.y * n.all_rows + chunk.begin) * row_floats;
    const int count = TENSOR ? (taps + 7) / 8 * 8 * GROUP * GROUPS : chunk.count * row_floats;
    for (int i = 4 * threadIdx.x; i < count; i += 4 * THREADS) cp_async<16>(to + i, from + i);
    if (!TENSOR) return;
    for (int tap = threadIdx.x; tap < (taps + 7) / 8 * 8; tap += THREADS) {
        const int row = chunk.begin + tap / (FIN * n.kx), f = tap / n.kx % FIN, dx = tap % n.kx;
        const int line = ((row / n.ky - chunk.plane) * FIN + f) * n.plane + row % n.ky * n.pitch;
        offsets[tap] = tap < taps ? line + dx : 0;
    }
}

/* Adds a chunk's taps; `at`: the start of the window of this lane's first voxel in the tile. RING: the chunk's planes
 * start in slot `slot` and wrap around.
 */
template <int FIN, int GROUPS, int KX, bool RING>
DEVICE void add_rows(float (&sums)[LANE][GROUPS][LANE], const float* tile, const float* kernels, int at,
                     const Chunk& chunk, int slot, const Sizes& n) {
#pragma unroll 1
    for (int row = chunk.begin; row < chunk.begin + chunk.count; ++row) {
        int plane = row / n.ky - chunk.plane;
        if (RING) plane += plane + slot < n.slots ? slot : slot - n.slots;
        const float* line = tile + plane * FIN * n.plane + row % n.ky * n.pitch + at;
#pragma unroll 1
        for (int f = 0; f < FIN; ++f, line += n.plane) {
            float in[(LANE + KX + 2) / 4 * 4];
#pragma unroll
            for (int i = 0; i < (LANE + KX + 2) / 4; ++i) {
                const float4 four = *reinterpret_cast<const float4*>(line + 4 * i);
                in[4 * i] = four.x, in[4 * i + 1] = four.y, in[4 * i + 2] = four.z, in[4 * i + 3] = four.w;
            }
#pragma unroll
            for (int dx = 0; dx < KX; ++dx, kernels += GROUP * GROUPS) {
#pragma unroll
                for (int c = 0; c < GROUPS; ++c) {
                    const float4 w = *reinterpret_cast<const float4*>(kernels + GROUP * c);
#pragma unroll
                    for (int v = 0; v < LANE; ++v) {
                        sums[v][c][0] += in[v + dx] * w.x;
                        sums[v][c][1] += in[v + dx] * w.y;
                        sums[v][c][2] += in[v + dx] * w.z;
                        sums[v][c][3] += in[v + dx] * w.w;
                    }
                }
            }
        }
    }
}

/* Adds a chunk's taps in matrix products of 8 taps; `offsets` of the taps in the tile, `at` of each of the four voxels.
 * RING: the tile has `ring` floats, and its first plane is `first` floats from its start.
 */
template <int GROUPS, bool RING>
DEVICE void add_taps(float (&sums)[LANE][GROUPS][LANE], const float* tile, const float* kernels, const unsigned short* offsets,
                     const int (&at)[LANE], int eights, int first, int ring) {
    const int lane = threadIdx.x % WARP, t = lane % 4;
    for (int eight = 0; eight < eights; ++eight, kernels += GROUPS * WARP * 4) {
        int low = offsets[8 * eight + t], high = offsets[8 * eight + t + 4];
        if (RING) low += low + first < ring ? first : first - ring, high += high + first < ring ? first : first - ring;
        unsigned a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            a[m][0] = bits_of(tile[at[2 * m] + low]), a[m][1] = bits_of(tile[at[2 * m + 1] + low]);
            a[m][2] = bits_of(tile[at[2 * m] + high]), a[m][3] = bits_of(tile[at[2 * m + 1] + high]);
        }
#pragma unroll
        for (int c = 0; c < GROUPS; ++c) {
            const float4 w = *reinterpret_cast<const float4*>(kernels + (c * WARP + lane) * 4);
            const unsigned b[2][2] = {{bits_of(w.x), bits_of(w.y)}, {bits_of(w.z), bits_of(w.w)}};
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float d[4] = {sums[2 * m][c][2 * i], sums[2 * m][c][2 * i + 1], sums[2 * m + 1][c][2 * i],
                                  sums[2 * m + 1][c][2 * i + 1]};
                    mma_tf32(d, a[m], b[i]);
                    sums[2 * m][c][2 * i] = d[0], sums[2 * m][c][2 * i + 1] = d[1];
                    sums[2 * m + 1][c][2 * i] = d[2], sums[2 * m + 1][c][2 * i + 1] = d[3];
                }
        }
    }
}

/* Writes the results of this lane's voxels at z, `g0` the first of its maps; returns the largest magnitude. */
template <int GROUPS, bool TENSOR, int KIND, bool VECTORS, class T>
DEVICE float write_out(T* image, const float (&sums)[LANE][GROUPS][LANE], int z, int g0, float largest, const Sizes& n) {
#pragma unroll
    for (int v = 0; v < LANE; ++v) {
        sync_warp();  // one voxel after the other: the registers hold no more addresses
        const int y = n.y0 + voxel_of<TENSOR>(v) / n.wide, column = n.x0 + voxel_of<TENSOR>(v) % n.wide;
        const bool inside = y < n.my && column < n.mx;
        T* const to = image + (((long long)z * n.my + y) * n.mx + column) * n.maps + g0;
#pragma unroll
        for (int c = 0; c < GROUPS; ++c) {
            const int known = inside ? n.maps - g0 - GROUP * c : 0;
            float value[LANE];
#pragma unroll
            for (int j = 0; j < LANE; ++j) value[j] = activate<KIND>(sums[v][c][j]);
            if (VECTORS && known > 0)
                store_activation4(to + GROUP * c, make_float4(value[0], value[1], value[2], value[3]));
#pragma unroll
            for (int j = 0; j < LANE; ++j) {
                if (j >= known) continue;
                largest = larger_magnitude(largest, value[j]);
                if (!VECTORS) store_activation(to + GROUP * c + j, value[j]);
            }
        }
    }
    return largest;
}

/* KX: the kernel's size along x; 0: in matrix products, any size. KIND: the activation. VECTORS: four maps are written
 * at once: their number and all addresses allow it. AHEAD: see above.
 */
template <class T, int FIN, int GROUPS, int KX, int KIND, bool VECTORS, bool AHEAD>
__global__ void __launch_bounds__(THREADS, 2)
    first(const T* before, long long before_image, const T* x, long long x_image, T* out, long long out_image,
          const float* kernels, const float* bias, long long carried, long long ny, long long nx, long long mz,
          long long my, long long mx, long long maps, long long kz, long long ky, long long kx, long long rows,
          long long wide, long long planes, long long slots, long long pitch, long long kernel_floats, long long tiles_y,
          long long steps, float* peak) {
    constexpr bool TENSOR = KX == 0, HELD = TENSOR || sizeof(T) < 4;  // in registers on the way to the tile
    EXTERN_SHARED(float, shared);  // Sizes; biases; a chunk's kernels, planes, offsets of its taps
    Sizes& n = *reinterpret_cast<Sizes*>(shared);
    const int tiles_x = ((int)mx + (int)wide - 1) / (int)wide;
    const int z_begin = blockIdx.x / (tiles_x * (int)tiles_y) * (int)steps;
    if (threadIdx.x == 0) {
        n.carried = carried, n.ny = ny, n.nx = nx, n.my = my, n.mx = mx, n.maps = maps, n.ky = ky, n.kx = kx, n.wide = wide;
        n.lines = TILE / wide + ky - 1, n.pitch = pitch, n.plane = n.lines * n.pitch;
        n.x0 = blockIdx.x % tiles_x * (int)wide, n.y0 = blockIdx.x / tiles_x % (int)tiles_y * (TILE / (int)wide);
        n.z_end = min(z_begin + steps, mz);
        n.all_rows = kz * ky, n.rows = rows, n.chunks = (kz * ky + rows - 1) / rows, n.kernel_floats = kernel_floats;
        n.planes = planes, n.slots = slots;
        n.before = before + blockIdx.z * before_image, n.x = x + blockIdx.z * x_image - carried * ny * nx * FIN;
        n.columns = (wide + kx - 1) * FIN, n.step_lines = THREADS / n.columns, n.step_columns = THREADS % n.columns;
    }
    if (threadIdx.x < GROUP * GROUPS) shared[HEAD + threadIdx.x] = bias[blockIdx.y * GROUP * GROUPS + threadIdx.x];
    sync_block();
    const bool alternates = AHEAD && n.chunks > 1;  // whether two buffers alternate
    float* const staged = shared + HEAD + GROUP * GROUPS;
    float* const tile = staged + (alternates ? 2 : 1) * n.kernel_floats;
    unsigned short* const offsets = reinterpret_cast<unsigned short*>(tile + (int)slots * FIN * n.plane);
    const int more_offsets = ((int)rows * FIN * n.kx + 7) / 8 * 8;
    const int lane = threadIdx.x % WARP, t = lane % 4;
    const int g0 = blockIdx.y * GROUP * GROUPS + 4 * t;
    int at[LANE];  // start of the window of each voxel in the tile
#pragma unroll
    for (int v = 0; v < LANE; ++v) at[v] = voxel_of<TENSOR>(v) / n.wide * n.pitch + voxel_of<TENSOR>(v) % n.wide;

    int slot = 0;  // slot of the tile where planes of a chunk start
    if constexpr (AHEAD) {
        stage_kernels<FIN, GROUPS, TENSOR>(staged, offsets, kernels, Chunk(0, n), n);
        const int count = Chunk(0, n).planes;
        const T *const early = static_cast<const T*>(n.before), *const late = static_cast<const T*>(n.x);
        if constexpr (HELD)
            stage_planes<T, FIN, TENSOR>(tile, early, late, z_begin, count, n);
        else
            copy_planes(tile, Cursor<T, FIN>{early, late, z_begin, count, n});
        cp_async_commit();
    }
    float largest = 0.0f;
#pragma unroll 1
    for (int z = z_begin; z < n.z_end; ++z) {
        float sums[LANE][GROUPS][LANE];
#pragma unroll
        for (int c = 0; c < GROUPS; ++c)
#pragma unroll
            for (int v = 0; v < LANE; ++v) {
                const float4 start = *reinterpret_cast<const float4*>(shared + HEAD + GROUP * c + 4 * t);
                sums[v][c][0] = start.x, sums[v][c][1] = start.y, sums[v][c][2] = start.z, sums[v][c][3] = start.w;
            }
#pragma unroll 1
        for (int number = 0; number < n.chunks; ++number) {
            const Chunk chunk(number, n);
            const bool second = alternates && slot > 0;  // whether the second of two buffers is used
            const int eights = (chunk.count * FIN * n.kx + 7) / 8;
            const T *const early = static_cast<const T*>(n.before), *const late = static_cast<const T*>(n.x);
            T held[AT_ONCE];
            int filled = 0, first = z + chunk.plane, count = chunk.planes;  // AHEAD: position of the data loaded next
            if constexpr (AHEAD) {
                cp_async_wait<0>();
                sync_block();  // this chunk is there, and no thread reads the one before
                const bool last = number + 1 == n.chunks;
                filled = slot + n.planes < n.slots ? slot + n.planes : slot + n.planes - n.slots;
                first = z + n.planes, count = z + last < n.z_end ? 1 : 0;
                if (alternates && count > 0) {
                    const Chunk next(last ? 0 : number + 1, n);
                    stage_kernels<FIN, GROUPS, TENSOR>(staged + (second ? 0 : n.kernel_floats),
                                                       offsets + (second ? 0 : more_offsets), kernels, next, n);
                    first = z + last + next.plane, count = next.planes;
                }
                if constexpr (HELD)
                    load_planes(held, Cursor<T, FIN>{early, late, first, count, n});
                else
                    copy_planes(tile + filled * FIN * n.plane, Cursor<T, FIN>{early, late, first, count, n});
                cp_async_commit();
            } else {
                if (n.chunks > 1 || z == z_begin)
                    stage_kernels<FIN, GROUPS, TENSOR>(staged, offsets, kernels, chunk, n);
                cp_async_commit();
                stage_planes<T, FIN, TENSOR>(tile, early, late, first, count, n);
                cp_async_wait<0>();
                sync_block();
            }
            const float* const here = staged + (second ? n.kernel_floats : 0);
            if constexpr (TENSOR)
                add_taps<GROUPS, AHEAD>(sums, tile, here, offsets + (second ? more_offsets : 0), at, eights,
                                        slot * FIN * n.plane, n.slots * FIN * n.plane);
            else
                add_rows<FIN, GROUPS, KX, AHEAD>(sums, tile, here + 4 * t, at[0], chunk, slot, n);
            if constexpr (!AHEAD) sync_block();
            if constexpr (AHEAD && HELD) 
                store_planes<TENSOR>(tile + filled * FIN * n.plane, held, Cursor<T, FIN>{early, late, first, count, n});
            if constexpr (AHEAD) slot = alternates ? filled : slot + 1 < n.slots ? slot + 1 : 0;
        }
        T* const image = out + blockIdx.z * out_image;
        largest = write_out<GROUPS, TENSOR, KIND, VECTORS>(image, sums, z, g0, largest, n);
    }
    raise_peak_by_warp(peak, largest);
}

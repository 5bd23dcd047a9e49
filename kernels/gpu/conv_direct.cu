/* Direct convolution of any shape: the definition, one thread per output voxel, and the same with input in shared
 * memory.
 *
 * Computes   out[s, i, g] = activation(bias[g] + sum over d, f of x[s, i * step + d - pad, f] * kernels[(d, f), g]);
 *            outside of an image x is 0.
 * Shapes     x (S, n, f), out (S, m, f') float or half, images in C order, any number of values apart; kernels (kz * ky
 *            * kx * f, padded f') float, bias (padded f') float: f' rounded up to whole groups of GROUP maps.
 *            `vectors`: four maps are written at once: their number and all addresses of out allow it.
 * Launch     plain   128 threads: a thread computes one voxel, all its maps, GROUP of them at a time in registers. grid
 *            (blocks of voxels, counted through all images).
 *            tiled   up to 6 warps. The tile of output voxels is `wide` along x; a warp takes 32 / wide lanes of four
 *                    neighbours along y, warps are arranged `warps_y` along y and then along z, and warps_maps warps
 *                    have the same voxels and other groups of maps. `planes` taps along z of `chunk` input maps are
 *                    staged at a time: tile [chunk][plane floats], lines `pitch` floats apart. grid (tiles of all
 *                    images, blocks of maps). With step 1 a lane reads one new value a tap along y and shifts the other
 *                    three.
 *            split_sums: sums of each part go to totals in shared memory, since long sums in float32 lose digits.
 *            softmax: a block takes all maps, once to compute the softmax's sum and, if one pass does not hold them,
 *            once more to write them.
 * Bound      arithmetic: tiled: 4 GROUP products for GROUP / 4 + 1 + 3 / ky reads of shared memory and L1; plain: GROUP
 *            products for GROUP / 4 + 1 reads, of which the one of x touches up to 32 lines if x has many maps.
 * Source     first principles: Convolution in CUDA from first principles (thread model; its shared-memory version);
 *            strides and padding: Chetlur et al., cuDNN, 2014, 3.
 * Tested     tests/kernels/gpu/test_conv_direct.py
 */
#include "activation.cuh"

constexpr int THREADS = 128;    // threads of a block of `plain`, as in conv_direct.py
constexpr int MOST_WARPS = 6;   // warps of a block of `tiled`, as in conv_direct.py
constexpr int LANE = 4;         // voxels of a lane of `tiled`, neighbours along y, as in conv_direct.py
constexpr int HEAD = 32;        // floats, for Staged, as in conv_direct.py
constexpr int AT_ONCE = 4;      // lines for which a warp has inputs in flight

/* Adds value * kernels of one tap to sums. */
template <int GROUP, int VOXELS>
DEVICE void add_tap(float (&sums)[VOXELS][GROUP], const float (&in)[VOXELS], const float* kernels) {
    if constexpr (GROUP == 1) {
        const float w = load_activation(kernels);
#pragma unroll
        for (int v = 0; v < VOXELS; ++v) sums[v][0] += in[v] * w;
    } else {
#pragma unroll
        for (int g = 0; g < GROUP; g += 4) {
            const float4 w = load_activation4(kernels + g);
#pragma unroll
            for (int v = 0; v < VOXELS; ++v) {
                sums[v][g] += in[v] * w.x;
                sums[v][g + 1] += in[v] * w.y;
                sums[v][g + 2] += in[v] * w.z;
                sums[v][g + 3] += in[v] * w.w;
            }
        }
    }
}

/* The running state of a voxel's softmax: the largest map, and the sum of exp(value - largest). */
struct Summed {
    float largest, sum;
};
DEVICE Summed joined(Summed a, Summed b) {
    const float largest = maximum(a.largest, b.largest);
    if (largest == -INFINITY) return {largest, 0.0f};  // no maps yet
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}
template <int GROUP> DEVICE Summed joined(Summed all, const float (&sums)[GROUP], int known) {
    float largest = all.largest;
#pragma unroll
    for (int g = 0; g < GROUP; ++g)
        if (g < known) largest = maximum(largest, sums[g]);
    if (largest == -INFINITY) return {largest, 0.0f};
    float sum = all.sum * expf(all.largest - largest);
#pragma unroll
    for (int g = 0; g < GROUP; ++g)
        if (g < known) sum += expf(sums[g] - largest);
    return {largest, sum};
}

/* Writes maps first .. first + COUNT of a group of which `known` exist; returns the largest |value|, or `largest`. */
template <class T, int GROUP, int COUNT>
DEVICE float finish(T* to, const float (&sums)[GROUP], int first, int known, int activation, Summed all, bool vectors,
                    float largest) {
    float values[COUNT];
#pragma unroll
    for (int g = 0; g < COUNT; ++g) {
        const float sum = sums[first + g];
        values[g] = activation == SOFTMAX ? expf(sum - all.largest) / all.sum : activate(sum, activation);
        if (first + g >= known) continue;
        largest = larger_magnitude(largest, values[g]);
        if (COUNT == 1 || !vectors) store_activation(to + first + g, values[g]);
    }
    if constexpr (COUNT == 4)
        if (vectors && first < known)
            store_activation4(to + first, make_float4(values[0], values[1], values[2], values[3]));
    return largest;
}

template <class T, int GROUP>
__global__ void __launch_bounds__(THREADS, 4)
    plain(const T* __restrict__ before, long long before_image, const T* __restrict__ x, long long x_image, T* out,
          long long out_image, const float* __restrict__ kernels, const float* __restrict__ bias, long long images,
          long long carried, long long nz, long long ny, long long nx, long long fin, long long mz, long long my,
          long long mx, long long maps, long long kz, long long ky, long long kx, long long step_z, long long step_y,
          long long step_x, long long pad_z, long long pad_y, long long pad_x, long long activation, long long vectors,
          float* peak) {
    const long long voxels = mz * my * mx, voxel = global_thread();
    const bool known_voxel = voxel < images * voxels;
    const long long s = voxel / voxels, i = voxel % voxels;
    const int z0 = i / (my * mx) * step_z - pad_z, y0 = i / mx % my * step_y - pad_y, x0 = i % mx * step_x - pad_x;
    const int first_y = max(0, -y0), end_y = min((int)ky, (int)ny - y0);  // taps inside the image
    const int first_x = max(0, -x0), end_x = min((int)kx, (int)nx - x0);
    const long long origin = ((long long)(y0 + first_y) * nx + x0 + first_x) * fin;
    const T* const fresh = x + s * x_image + origin - carried * ny * nx * fin;  // both as if all planes were there
    const T* const old = before + s * before_image + origin;
    T* const to = out + s * out_image + i * maps;
    const int padded = (maps + GROUP - 1) / GROUP * GROUP;
    const long long from_line = nx * fin;
    constexpr int MAPS = GROUP == 1 ? 1 : 4;  // maps written at a time
    const bool soft = activation == SOFTMAX, twice = soft && maps > GROUP;
    Summed all = {-INFINITY, 0.0f};
    float largest = 0.0f;
#pragma unroll 1
    for (int round = twice ? 0 : 1; round < 2 && known_voxel; ++round) {
#pragma unroll 1
        for (int g0 = 0; g0 < maps; g0 += GROUP) {
            float sums[1][GROUP];
#pragma unroll
            for (int g = 0; g < GROUP; ++g) sums[0][g] = bias[g0 + g];
#pragma unroll 1
            for (int dz = max(0, -z0); dz < min((int)kz, (int)nz - z0); ++dz) {
                const T* line = (z0 + dz < carried ? old : fresh) + (z0 + dz) * ny * from_line;
#pragma unroll 1
                for (int dy = first_y; dy < end_y; ++dy, line += from_line) {
                    float part[1][GROUP] = {};  // separate, since long sums in float32 lose digits
                    const float* taps = kernels + ((dz * ky + dy) * kx + first_x) * fin * padded + g0;
                    const T* const end = line + (end_x - first_x) * (int)fin;
#pragma unroll(GROUP < 16 ? 2 : 1)
                    for (const T* from = line; from < end; ++from, taps += padded) {  // neighbours along x, all maps
                        const float in[1] = {load_activation(from)};
                        add_tap<GROUP, 1>(part, in, taps);
                    }
#pragma unroll
                    for (int g = 0; g < GROUP; ++g) sums[0][g] += part[0][g];
                }
            }
            if (soft && (round == 0 || !twice)) all = joined<GROUP>(all, sums[0], maps - g0);
            if (round == 0) continue;
#pragma unroll
            for (int g = 0; g < GROUP; g += MAPS)
                largest = finish<T, GROUP, MAPS>(to + g0, sums[0], g, maps - g0, activation, all, vectors, largest);
        }
    }
    raise_peak_by_warp(peak, largest);
}

/* The layout of a tile's input in shared memory, and its origin: stored there too, because registers are for sums. */
template <class T> struct Staged {
    const T *old, *fresh;                  // inputs of this image, as if all planes were there
    int carried, nz, ny, nx, fin;
    int z0, y0, x0;                        // start of the tile's window in the input, possibly outside
    int lines, columns;                    // of a plane: lines; of a line: columns
    int pitch, plane;                      // floats from line to line, from map to map
    int more_planes;                       // planes for voxels after the first
    int tile_z, tile_y, tile_x;            // tile of the output
    T* out;                                // output of this image
};

/* Stages `planes` planes from z0 + dz on of `count` maps from f0 on. */
template <class T> DEVICE void stage(float* tile, const Staged<T>& n, int dz, int planes, int f0, int count) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int all = planes * n.lines, values = n.columns * count;
    for (int first = warp; first < all; first += warps * AT_ONCE) {
        const T* from[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int line = first + j * warps;
            const int z = n.z0 + dz + line / n.lines, y = n.y0 + line % n.lines;
            const bool inside = line < all && z >= 0 && z < n.nz && y >= 0 && y < n.ny;
            const T* const image = z < n.carried ? n.old : n.fresh;
            from[j] = inside ? image + (((long long)z * n.ny + y) * n.nx + n.x0) * n.fin + f0 : nullptr;
        }
        for (int e = lane; e < values; e += WARP) {
            const int column = count == 1 ? e : e / count, f = e - column * count;
            const bool inside = n.x0 + column >= 0 && n.x0 + column < n.nx;
            float in[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)  // all are in flight before the first is waited for
                in[j] = inside && from[j] != nullptr ? load_activation(from[j] + column * n.fin + f) : 0.0f;
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int line = first + j * warps;
                if (line < all) tile[f * n.plane + line * n.pitch + column] = in[j];
            }
        }
    }
}

/* Adds taps dz .. dz + planes of maps f0 .. f0 + count, staged at `at` for this lane's first voxel. */
template <int GROUP>
DEVICE void accumulate(float (&sums)[LANE][GROUP], const float* at, int plane, int plane_lines, int pitch,
                       const float* kernels, int planes, int count, int ky, int kx, int step_y, long long fin,
                       long long padded) {
    const long long row = kx * fin * padded;  // kernel values to the next tap along y
#pragma unroll 1
    for (int dz = 0; dz < planes; ++dz) {
#pragma unroll 1
        for (int dx = 0; dx < kx; ++dx) {
            const float* lines = at + dz * plane_lines * pitch + dx;
            const float* taps = kernels + (dz * ky * kx + dx) * fin * padded;
#pragma unroll 1
            for (int f = 0; f < count; ++f, lines += plane, taps += padded) {
                float in[LANE];
#pragma unroll(GROUP < 16 ? 4 : 1)
                for (int dy = 0; dy < ky; ++dy) {
                    if (dy == 0 || step_y != 1) {
#pragma unroll
                        for (int v = 0; v < LANE; ++v) in[v] = lines[(v * step_y + dy) * pitch];
                    } else {
#pragma unroll
                        for (int v = 1; v < LANE; ++v) in[v - 1] = in[v];
                        in[LANE - 1] = lines[(LANE - 1 + dy) * pitch];
                    }
                    add_tap<GROUP, LANE>(sums, in, taps + dy * row);
                }
            }
        }
    }
}

/* Adds sums to total (`first`: replaces it) and clears sums; `last`: leaves the total in sums instead. */
template <int GROUP> DEVICE void add_to_totals(float (&sums)[LANE][GROUP], float* total, bool first, bool last) {
#pragma unroll
    for (int v = 0; v < LANE; ++v) {
        sync_warp();  // one voxel after the other: the registers hold no more of them
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            float& mine = total[(v * GROUP + g) * MOST_WARPS * WARP];
            if (!first) sums[v][g] += mine;
            if (last) continue;
            mine = sums[v][g];
            sums[v][g] = 0.0f;
        }
    }
}

/* Adds all taps of all input maps to sums, as many at a time as the tile has space for; `any`: this warp has output
 * maps. at: this lane's first voxel in `tile`. kernels: at the warp's first map. total: sums of parts, if `split_sums`.
 */
template <class T, int GROUP>
DEVICE void sum_taps(float (&sums)[LANE][GROUP], bool any, float* tile, const float* at, float* total, bool split_sums,
                     const Staged<T>& n, const float* kernels, long long padded, long long fin, long long kz,
                     long long ky, long long kx, int step_y, long long planes, long long chunk) {
#pragma unroll 1
    for (int dz = 0; dz < kz; dz += planes) {
        const int taps_z = min((int)planes, (int)kz - dz);
#pragma unroll 1
        for (int f0 = 0; f0 < fin; f0 += chunk) {
            const int count = min((int)chunk, (int)fin - f0);
            sync_block();
            stage<T>(tile, n, dz, n.more_planes + taps_z, f0, count);
            sync_block();
            const float* const taps = kernels + (dz * ky * kx * fin + f0) * padded;
            if (any)
                accumulate<GROUP>(sums, at, n.plane, n.lines, n.pitch, taps, taps_z, count, (int)ky, (int)kx, step_y,
                                  fin, padded);
            if (!split_sums) continue;
            add_to_totals<GROUP>(sums, total + threadIdx.x, dz + f0 == 0, dz + planes >= kz && f0 + chunk >= fin);
        }
    }
}

/* summed [LANE][threads]: the softmax state of this thread's voxels so far, updated with these maps; `first`: there was
 * none.
 */
template <int GROUP> DEVICE void join_maps(Summed* summed, const float (&sums)[LANE][GROUP], bool first, int known) {
#pragma unroll
    for (int v = 0; v < LANE; ++v) {
        const Summed before_these = first ? Summed{-INFINITY, 0.0f} : summed[v * blockDim.x + threadIdx.x];
        summed[v * blockDim.x + threadIdx.x] = joined<GROUP>(before_these, sums[v], known);
    }
}

/* Writes maps from g0 on of a lane's voxels, the first of which is (lz, ly, lx) of the tile; the warp is number
 * `warp_maps` of the `warps_maps` with these voxels. Returns the largest |value|, or `largest`.
 */
template <class T, int GROUP>
DEVICE float write_voxels(const float (&sums)[LANE][GROUP], const Staged<T>& n, const Summed* summed, int lz, int ly,
                          int lx, int g0, int warp_maps, int warps_maps, long long mz, long long my, long long mx,
                          long long maps, int activation, bool vectors, float largest) {
    constexpr int MAPS = GROUP == 1 ? 1 : 4;  // maps written at a time
#pragma unroll
    for (int v = 0; v < LANE; ++v) {
        const int z = n.tile_z + lz, y = n.tile_y + ly + v, column = n.tile_x + lx;
        const int known = z < mz && y < my && column < mx ? (int)maps - g0 : 0;
        Summed all = {-INFINITY, 0.0f};  // sums of all warps with this voxel
        for (int other = 0; activation == SOFTMAX && other < warps_maps; ++other)
            all = joined(all, summed[v * blockDim.x + threadIdx.x + (other - warp_maps) * WARP]);
        T* const to = n.out + ((z * my + y) * mx + column) * maps + g0;
#pragma unroll
        for (int g = 0; g < GROUP; g += MAPS) {
            sync_warp();  // some maps after the other: the registers hold no more of them
            largest = finish<T, GROUP, MAPS>(to, sums[v], g, known, activation, all, vectors, largest);
        }
    }
    return largest;
}

template <class T, int GROUP>
__global__ void __launch_bounds__(MOST_WARPS * WARP, 2)
    tiled(const T* __restrict__ before, long long before_image, const T* __restrict__ x, long long x_image, T* out,
          long long out_image, const float* __restrict__ kernels, const float* __restrict__ bias, long long images,
          long long carried, long long nz, long long ny, long long nx, long long fin, long long mz, long long my,
          long long mx, long long maps, long long kz, long long ky, long long kx, long long step_z, long long step_y,
          long long step_x, long long pad_z, long long pad_y, long long pad_x, long long activation, long long vectors,
          float* peak, long long wide, long long warps_y, long long warps_maps, long long planes, long long chunk,
          long long pitch, long long plane, long long split_sums) {
    EXTERN_SHARED(float, staged);  // Staged, tile [chunk][plane]; if `split_sums`, totals; for softmax [LANE][threads]
    Staged<T>& n = *reinterpret_cast<Staged<T>*>(staged);
    float* const tile = staged + HEAD;
    float* const total = tile + (chunk * plane + 1) / 2 * 2;  // [LANE * GROUP][MOST_WARPS * WARP]
    Summed* const summed = reinterpret_cast<Summed*>(total + (split_sums ? LANE * GROUP * MOST_WARPS * WARP : 0));
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int warp_maps = warp % (int)warps_maps, warp_voxels = warp / (int)warps_maps;
    const int rows = WARP / (int)wide * LANE;  // lines of a warp along y
    if (threadIdx.x == 0) {
        const int high = (int)warps_y * rows, deep = blockDim.x / WARP / (int)(warps_maps * warps_y);
        const int tiles_x = (mx + wide - 1) / wide, tiles_y = (my + high - 1) / high, tiles_z = (mz + deep - 1) / deep;
        const int s = blockIdx.x / (tiles_z * tiles_y * tiles_x);
        n.old = before + s * before_image, n.fresh = x + s * x_image - carried * ny * nx * fin;
        n.out = out + s * out_image;
        n.carried = carried, n.nz = nz, n.ny = ny, n.nx = nx, n.fin = fin;
        n.tile_z = blockIdx.x / (tiles_y * tiles_x) % tiles_z * deep;
        n.tile_y = blockIdx.x / tiles_x % tiles_y * high, n.tile_x = blockIdx.x % tiles_x * (int)wide;
        n.z0 = n.tile_z * (int)step_z - (int)pad_z, n.y0 = n.tile_y * (int)step_y - (int)pad_y;
        n.x0 = n.tile_x * (int)step_x - (int)pad_x;
        n.lines = (high - 1) * (int)step_y + (int)ky, n.columns = ((int)wide - 1) * (int)step_x + (int)kx;
        n.pitch = pitch, n.plane = plane, n.more_planes = (deep - 1) * (int)step_z;
    }
    sync_block();
    const int lz = warp_voxels / (int)warps_y;  // this lane's first voxel in the tile
    const int ly = warp_voxels % (int)warps_y * rows + lane / (int)wide * LANE, lx = lane % (int)wide;
    const float* const at = tile + (lz * (int)step_z * n.lines + ly * (int)step_y) * n.pitch + lx * (int)step_x;
    const int padded = (maps + GROUP - 1) / GROUP * GROUP, block_maps = (int)warps_maps * GROUP;
    const bool soft = activation == SOFTMAX;
    const int blocks = soft ? (maps + block_maps - 1) / block_maps : 1;
    float largest = 0.0f;
#pragma unroll 1
    for (int round = blocks > 1 ? 0 : 1; round < 2; ++round) {
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
            const int g0 = (blockIdx.y + block) * block_maps + warp_maps * GROUP;
            const bool any = g0 < maps;
            float sums[LANE][GROUP];
#pragma unroll
            for (int v = 0; v < LANE; ++v)
#pragma unroll
                for (int g = 0; g < GROUP; ++g) sums[v][g] = any ? bias[g0 + g] : 0.0f;
            sum_taps<T, GROUP>(sums, any, tile, at, total, split_sums, n, kernels + g0, padded, fin, kz, ky, kx,
                               (int)step_y, planes, chunk);
            if (soft && (round == 0 || blocks == 1)) {
                join_maps<GROUP>(summed, sums, block == 0, (int)maps - g0);
                sync_block();
            }
            if (round == 0) continue;
            largest = write_voxels<T, GROUP>(sums, n, summed, lz, ly, lx, g0, warp_maps, (int)warps_maps, mz, my, mx,
                                             maps, activation, vectors, largest);
        }
    }
    raise_peak_by_warp(peak, largest);
}

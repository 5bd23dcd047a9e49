/* Convolution of graphs as a product of the kernels with the lowered matrix, both read by the tensor cores of sm_90a from
 * shared memory; any stride, dilation and padding, several inputs, upsampled ones too; addend, bias and function.
 *
 * Computes   out[i, g] = function(bias[g] + addend[i, g] + sum over d, f of x[i stride - padding + d dilation, f] *
 *            kernels[g, f, d]), where x holds the maps of all inputs one after the other; voxel j of an upsampled input
 *            is (j + first) / factor. With several parts: the sums of each part, float [part][voxel][map], without
 *            the rest; sums.cu adds them.
 * Shapes     inputs (z, y, x, f) half, each with its own strides; addend as out; out (z, y, x, f') half in C order. Pieces
 *            of 8 maps of all inputs, each padded with zeros, two of which are a chunk; kernels [block of maps][chunk][tap]
 *            [2][64][8] half, taps up to a multiple of GROUP, bias (blocks * maps of a block) float.
 * Method     A product is 64 x 16 by 16 x N: kernels of 64 maps, and N columns, 8 along x and the others along any axis. A
 *            tile's input for a chunk, its region, is stored piece after piece, in each voxel after voxel, those with
 *            the same residue of x modulo the stride together: any 8 columns are a core of a factor (wgmma.cuh), so
 *            a tap is an offset and the lowered matrix is never built. One warpgroup loads (regions.cuh): a warp the
 *            kernels, GROUP taps at once, three the regions. Two multiply, each its own columns, and hand
 *            buffers back. A block computes every gridDim.x-th item, a tile's block of maps or a part of its sum.
 * Few maps   The 64 rows are those of 2 or 4 lines of out: a column is so many voxels, its kernels are as often shifted
 *            along y, with zeros around them: a NaN in the input at these zeros reaches the sums.
 * Bound      tensor cores: 64 N 16 products take N / 2 of their cycles, and 16 + N / 4 of shared memory's.
 * Source     Chetlur et al., cuDNN, 2014, 3; the region in place of the lowered matrix is ours.
 * Tested     tests/kernels/gpu/graph_gemm/test_primitive.py
 */
#include "graph/functions.cuh"
#include "regions.cuh"

/* What follows the sums. */
struct End {
    const float* bias;
    const half* addend;
    long long addend_z, addend_y, addend_x;  // values from plane to plane, ..
    half* out;
    float* sums;  // null, unless there are several parts
    int function;
    float a, b;
    int wide;  // 8 maps of out, and of the addend, may be copied at once
};

/* A function call, since inlined code for every sum would not fit the instruction cache. */
CALLED float4 called_function(float4 v, int function, float a, float b) {
    float values[4] = {v.x, v.y, v.z, v.w};
    apply_functions(values, function, a, b);
    return make_float4(values[0], values[1], values[2], values[3]);
}

template <int N, int MATRICES, int GROUP> struct Multiplier {
    static constexpr int SUMS = N / 2, SLOT = 16 * 16;  // sums of a thread for a matrix; values staged for 16 columns
    Shared& shared;
    const Layer& n;
    const End& end;
    const int warp, lane, first;  // warp of the warpgroup; the warpgroup's first matrix

    /* The first column of a matrix in its tile. */
    DEVICE int3 corner(int matrix) const {
        const int uz = (N / 8 - 1) * n.along_z + 1, uy = (N / 8 - 1) * n.along_y + 1, ux = n.along_x ? N : 8;
        const int across = n.tx / ux, down = n.ty / uy;
        return make_int3(matrix / across / down * uz, matrix / across % down * uy, matrix % across * ux);
    }

    /* Multiplies one item; the rings continue from item to item. */
    DEVICE void multiply(float (&sums)[MATRICES][SUMS], const Item& item, Ring& region, Ring& kernels) const {
        unsigned long long columns[MATRICES];
        const int apart = (n.along_z * n.stride_z * n.lines + n.along_y * n.stride_y) * n.width + n.along_x;
#pragma unroll
        for (int i = 0; i < MATRICES; ++i) {
            const int3 at = corner(first + i);
            const int offset = (at.x * n.stride_z * n.lines + at.y * n.stride_y) * n.width + at.z;
            columns[i] = wgmma_factor(shared.region(n, 0) + offset * PIECE, n.rows, apart);
        }
        const unsigned long long rows = wgmma_factor(shared.at<half>(n.kernels), ROWS, PIECE);
        const int4* const offsets = shared.at<const int4>(n.offsets);
        int kernels_before = -1, region_before = -1;  // buffers that the products before read
        int adds = 0;
#pragma unroll 1
        for (int chunk = item.begin; chunk < item.end; ++chunk) {
            barrier_wait(shared.region_filled + region.slot, region.parity);
            const int begin = region.slot * 2 * n.rows;
#pragma unroll 1
            for (int group = 0; group < n.groups; ++group) {
                const int4 four = offsets[group];
                const int offset[4] = {begin + four.x, begin + four.y, begin + four.z, begin + four.w};
                barrier_wait(shared.kernels_filled + kernels.slot, kernels.parity);
                const unsigned long long factor = rows + kernels.slot * (GROUP * TAP / PIECE);
                wgmma_begin(sums);  // with its end in one block of instructions: else the compiler waits for more
#pragma unroll
                for (int tap = 0; tap < GROUP; ++tap)
#pragma unroll
                    for (int i = 0; i < MATRICES; ++i)
                        wgmma_half<N>(sums[i], factor + tap * (TAP / PIECE), columns[i] + offset[tap], tap > 0 || adds);
                wgmma_end();
                wgmma_wait_but_last();
                adds = 1;
                give_back(kernels_before, region_before);
                kernels_before = kernels.slot, region_before = -1;
                kernels.next(n.kept);
            }
            region_before = region.slot;
            region.next(n.regions);
        }
#pragma unroll
        for (int i = 0; i < MATRICES; ++i) wgmma_wait(sums[i]);
        give_back(kernels_before, region_before);
    }

    /* Hands buffers back that were read; -1: none. */
    DEVICE void give_back(int kernels, int region) const {
        sync_warp();
        if (lane != 0) return;
        if (kernels >= 0) barrier_arrive(shared.kernels_read + kernels);
        if (region >= 0) barrier_arrive(shared.region_read + region);
    }

    /* Where a warp's rows belong: its first map, and the line of a column. */
    DEVICE void place(int& map, int& line) const {
        const int maps = ROWS / n.lines_at_once;
        line = warp * 16 / maps, map = warp * 16 % maps;
    }

    /* Writes the sums of one part. */
    DEVICE void store_sums(const float (&sums)[MATRICES][SUMS], const Item& item) const {
        int map, line;
        place(map, line);
        map += item.block * (ROWS / n.lines_at_once) + lane / 4;
        float* const part = end.sums + (long long)item.part * n.mz * n.my * n.mx * n.fout;
#pragma unroll
        for (int i = 0; i < MATRICES; ++i) {
            const int3 at = corner(first + i);
            int z = item.z + at.x, y = (item.y + at.y) * n.lines_at_once + line, x = item.x + at.z + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < N / 8; ++j) {
                float* const to = part + (((long long)z * n.my + y) * n.mx + x) * n.fout + map;
                if (z < n.mz && y < n.my) {
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (x + e % 2 < n.mx && map + e / 2 * 8 < n.fout) to[e % 2 * n.fout + e / 2 * 8] = sums[i][4 * j + e];
                }
                z += n.along_z, y += n.along_y * n.lines_at_once, x += n.along_x;
            }
        }
    }

    /* Applies what follows to the sums of 16 columns and writes them: returns the largest magnitude. */
    DEVICE float store(float (&sums)[MATRICES][SUMS], const Item& item) const {
        int from, line;  // the warp's first map
        place(from, line);
        from += item.block * (ROWS / n.lines_at_once);
        const float low = end.bias[from + lane / 4], high = end.bias[from + lane / 4 + 8];
        const bool has_low = from + lane / 4 < n.fout, has_high = from + lane / 4 + 8 < n.fout;
        const int maps = min(n.fout - from - lane % 2 * PIECE, PIECE);  // of the piece that this lane copies
        half* const staged = shared.at<half>(n.staged) + (threadIdx.x / WARP - WARPGROUP / WARP) * 2 * SLOT;
        // This lane copies half of a voxel, and passes a row of the matrices: 16 voxels of 2 pieces.
        const int voxel = lane / 2, mine = voxel * 16 + (lane % 2 ^ (voxel >> 2 & 1)) * PIECE;
        const int row = lane / 16 * 8 + lane % 8, theirs = row * 16 + (lane / 8 % 2 ^ (row >> 2 & 1)) * PIECE;
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < MATRICES; ++i) {
            const int3 at = corner(first + i);
            // of the two groups of 8 columns
            const int z = item.z + at.x, y = (item.y + at.y) * n.lines_at_once + line, x = item.x + at.z;
            const int step_y = n.along_y * n.lines_at_once;
#pragma unroll
            for (int j = 0; j < N / 8; j += 2) {
                half* const slot = staged + (i * (N / 16) + j / 2) % 2 * SLOT;
                const int mine_z = z + (j + lane / 16) * n.along_z, mine_y = y + (j + lane / 16) * step_y;
                const int mine_x = x + (j + lane / 16) * n.along_x + voxel % 8;
                const bool there = mine_z < n.mz & mine_y < n.my & mine_x < n.mx;
                float values[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) values[e] = sums[i][4 * j + e] + (e % 4 < 2 ? low : high);
                if (end.addend != nullptr) {
                    const half* const added = end.addend + mine_z * end.addend_z + mine_y * end.addend_y +
                                              mine_x * end.addend_x + from + lane % 2 * PIECE;
                    read(slot + mine, added, there ? maps : 0);
                    sync_warp();
                    unsigned words[4];
                    ldmatrix_transposed(words, slot + theirs);
                    sync_warp();
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float2 pair = to_float2(half2_from_bits(words[e]));
                        values[2 * e] += pair.x, values[2 * e + 1] += pair.y;
                    }
                }
                if (end.function == functions::RELU || end.function == functions::LEAKY_RELU) {
#pragma unroll
                    for (int e = 0; e < 8; ++e)
                        values[e] = end.function == functions::RELU
                                        ? apply_function(values[e], functions::RELU, 0.0f, 0.0f)
                                        : apply_function(values[e], functions::LEAKY_RELU, end.a, end.b);
                } else if (end.function != functions::NONE) {
#pragma unroll
                    for (int e = 0; e < 8; e += 4) {
                        const float4 four = called_function(
                            make_float4(values[e], values[e + 1], values[e + 2], values[e + 3]), end.function, end.a, end.b);
                        values[e] = four.x, values[e + 1] = four.y, values[e + 2] = four.z, values[e + 3] = four.w;
                    }
                }
                unsigned words[4];
#pragma unroll
                for (int e = 0; e < 8; e += 2) {
                    const int of_group = j + e / 4, column = x + of_group * n.along_x + lane % 4 * 2;
                    const bool exists = (e % 4 < 2 ? has_low : has_high) & (z + of_group * n.along_z < n.mz) &
                                        (y + of_group * step_y < n.my);
                    largest = larger_magnitude(largest, exists & (column < n.mx) ? values[e] : 0.0f);
                    largest = larger_magnitude(largest, exists & (column + 1 < n.mx) ? values[e + 1] : 0.0f);
                    words[e / 2] = bits_of(to_half2(values[e], values[e + 1]));
                }
                stmatrix_transposed(slot + theirs, words);
                sync_warp();
                half* const to = end.out + (((long long)mine_z * n.my + mine_y) * n.mx + mine_x) * n.fout + from +
                                 lane % 2 * PIECE;
                write(to, slot + mine, there ? maps : 0);
            }
        }
        sync_warp();  // the next item's first values go where the last were read
        return largest;
    }

    /* Copy a piece of so many maps. */
    DEVICE void read(half* to, const half* from, int maps) const {
        if (end.wide && maps > 0) {
            *reinterpret_cast<uint4*>(to) = __ldg(reinterpret_cast<const uint4*>(from));
            return;
        }
#pragma unroll 1
        for (int map = 0; map < PIECE; ++map) to[map] = map < maps ? __ldg(from + map) : to_half(0.0f);
    }
    DEVICE void write(half* to, const half* from, int maps) const {
        if (end.wide) {
            if (maps > 0) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
            return;
        }
#pragma unroll 1
        for (int map = 0; map < maps; ++map) to[map] = from[map];
    }
};

#define INPUT(i)                                                                                                       \
    const half *values_##i, long long z_##i, long long y_##i, long long x_##i, long long maps_##i, long long by_z_##i, \
        long long by_y_##i, long long by_x_##i, long long wide_##i
#define GIVEN(i)                                                                                                      \
    Input {                                                                                                           \
        values_##i, z_##i, y_##i, x_##i, (int)maps_##i, by_z_##i ? (int)first_z : 0, by_y_##i ? (int)first_y : 0,     \
            by_x_##i ? (int)first_x : 0, (int)by_z_##i, (int)by_y_##i, (int)by_x_##i, (int)wide_##i                   \
    }

template <int N, int MATRICES, int GROUP>
__global__ void __launch_bounds__(THREADS, 1) convolve_by_warpgroups(
    INPUT(0), INPUT(1), INPUT(2), INPUT(3), const half* addend, long long addend_z, long long addend_y,
    long long addend_x, half* out, float* sums, float* out_peak, const half* kernels, const float* bias, long long inputs,
    long long first_z, long long first_y, long long first_x, long long nz, long long ny, long long nx, long long mz,
    long long my, long long mx, long long fout, long long chunks, long long kz, long long ky, long long kx,
    long long stride_z, long long stride_y, long long stride_x, long long apart_z, long long apart_y, long long apart_x,
    long long pz, long long py, long long px, long long tz, long long ty, long long tx, long long tiles_z,
    long long tiles_y, long long tiles_x, long long blocks, long long parts, long long planes, long long lines,
    long long width, long long along_z, long long along_y, long long along_x, long long regions,
    long long kept, long long lines_at_once, long long wide, long long function, float a, float b) {
    EXTERN_SHARED(Shared, start);  // then offsets of taps, places of the region's voxels, regions, kernels, staged results
    Shared& shared = *start;
    Layer n;
    n.nz = (int)nz, n.ny = (int)ny, n.nx = (int)nx, n.mz = (int)mz, n.my = (int)my, n.mx = (int)mx, n.fout = (int)fout;
    n.inputs = (int)inputs, n.chunks = (int)chunks, n.groups = (int)((kz * ky * kx + GROUP - 1) / GROUP);
    n.kz = (int)kz, n.ky = (int)ky, n.kx = (int)kx;
    n.stride_z = (int)stride_z, n.stride_y = (int)stride_y, n.stride_x = (int)stride_x;
    n.apart_z = (int)apart_z, n.apart_y = (int)apart_y, n.apart_x = (int)apart_x;
    n.pz = (int)pz, n.py = (int)py, n.px = (int)px, n.tz = (int)tz, n.ty = (int)ty, n.tx = (int)tx;
    n.tiles_y = (int)tiles_y, n.tiles_x = (int)tiles_x, n.blocks = (int)blocks, n.parts = (int)parts;
    n.lines = (int)lines, n.width = (int)width, n.residue = (int)(width / stride_x);
    n.rows = (int)(planes * lines * width);
    n.along_z = (int)along_z, n.along_y = (int)along_y, n.along_x = (int)along_x;
    n.regions = (int)regions, n.kept = (int)kept, n.lines_at_once = (int)lines_at_once;
    n.offsets = sizeof(Shared), n.places = n.offsets + n.groups * (int)sizeof(int4);
    n.region = (n.places + n.rows * 4 + 127) / 128 * 128;
    n.kernels = n.region + n.regions * 2 * n.rows * PIECE * (int)sizeof(half);
    n.staged = n.kernels + n.kept * GROUP * TAP * (int)sizeof(half);

    if (threadIdx.x == 0) {
        for (int i = 0; i < n.regions; ++i) {
            barrier_begin(shared.region_filled + i, LOADERS);
            barrier_begin(shared.region_read + i, MULTIPLIERS * WARPGROUP / WARP);
        }
        for (int i = 0; i < n.kept; ++i) {
            barrier_begin(shared.kernels_filled + i, 1);
            barrier_begin(shared.kernels_read + i, MULTIPLIERS * WARPGROUP / WARP);
        }
        shared.inputs[0] = GIVEN(0), shared.inputs[1] = GIVEN(1), shared.inputs[2] = GIVEN(2);
        shared.inputs[3] = GIVEN(3);
    }
    for (int number = threadIdx.x; number < n.groups * 4; number += THREADS) {
        const int tap = min(number / 4 * GROUP + number % 4, n.kz * n.ky * n.kx - 1);  // behind the last: zeros
        const int dx = tap % n.kx * n.apart_x, dy = tap / n.kx % n.ky * n.apart_y, dz = tap / (n.kx * n.ky) * n.apart_z;
        shared.at<int>(n.offsets)[number] =
            (dz * n.lines + dy) * n.width + dx % n.stride_x * n.residue + dx / n.stride_x;
    }
    for (int row = threadIdx.x; row < n.rows; row += THREADS) {
        const int all = row / n.width, at = row - all * n.width, plane = all / n.lines, line = all - plane * n.lines;
        const int column = at % n.residue * n.stride_x + at / n.residue;
        shared.at<int>(n.places)[row] = plane << (LINE_BITS + COLUMN_BITS) | line << COLUMN_BITS | column;
    }
    sync_block();

    const int items = (int)(tiles_z * tiles_y * tiles_x * blocks * parts);
    const int group_of = shuffle((int)threadIdx.x / WARPGROUP, 0);  // uniform, as the compiler sees
    if (group_of == 0) {
        registers_lower<LOADERS_REGISTERS>();
        if (threadIdx.x == 0) bring_kernels<GROUP>(shared, n, kernels, items);
        if (threadIdx.x >= WARP) Loader{shared, n, (int)threadIdx.x - WARP}.bring_regions(items);
    } else {
        registers_raise<MULTIPLIERS_REGISTERS>();
        const End end = {bias, addend, addend_z, addend_y, addend_x, out, sums, (int)function, a, b, (int)wide};
        const Multiplier<N, MATRICES, GROUP> multiplier = {shared, n, end, (int)threadIdx.x / WARP % 4, (int)threadIdx.x % WARP,
                                                    (group_of - 1) * MATRICES};
        Ring region, taps;
        float largest = 0.0f;
#pragma unroll 1
        for (int number = blockIdx.x; number < items; number += gridDim.x) {
            const Item item(n, number);
            float all[MATRICES][N / 2];
            multiplier.multiply(all, item, region, taps);
            if (sums != nullptr)
                multiplier.store_sums(all, item);
            else
                largest = larger_magnitude(largest, multiplier.store(all, item));
        }
        raise_peak_by_warp(out_peak, largest);
    }
}

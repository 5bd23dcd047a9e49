/* Convolution of graphs as a product of the kernels with the lowered matrix, both read by the tensor cores of sm_90a from
 * shared memory; any stride, dilation and padding, several inputs, upsampled ones too; addend, bias and function.
 *
 * Computes   out[i, g] = function(bias[g] + addend[i, g] + sum over d, f of x[i stride - padding + d dilation, f] *
 *            kernels[g, f, d]), where x holds the maps of all inputs one after the other; voxel j of an upsampled input
 *            is (j + first) / factor. With several parts: the sums of each part, float [part][voxel][map], without
 *            the rest; sums.cu adds them. With moments: for each part of the voxels and each map also the mean and the
 *            squared deviations of out, where there is no function and no addend, and the number of its voxels.
 * Shapes     inputs (z, y, x, f) half, addend and out (z, y, x, f') half, each with its own strides. Pieces
 *            of 8 maps of all inputs, each padded with zeros, two or four of which are a chunk; kernels [block of
 *            maps][chunk][step][2][64][8] half, steps up to a multiple of GROUP, bias (blocks * maps of a block) float;
 *            moments [2][maps][parts] double, then [parts] double, as in norm.cu: a part is the lines of a tile that one
 *            warpgroup computes, those with the same place in a column.
 * Method     A product is 64 x 16 by 16 x N: kernels of 64 maps, and N columns, 8 along x and the others along any axis. A
 *            tile's input for a chunk, its region, is stored voxel after voxel, those with the same residue of x modulo
 *            the stride together: any 8 columns are a core of a factor (wgmma.cuh), so
 *            a tap is an offset and the lowered matrix is never built. One warpgroup loads (regions.cuh): a warp the
 *            kernels, GROUP steps at once, three the regions; a step is a tap for 16 maps. Two multiply, each its own columns, and hand
 *            buffers back. A block computes every gridDim.x-th item, a tile's block of maps or a part of its sum.
 * Few maps   The 64 rows are those of 2 or 4 lines of out: a column is so many voxels, its kernels are as often shifted
 *            along y, with zeros around them: a NaN in the input at these zeros reaches the sums.
 * Bound      tensor cores: 64 N 16 products take N / 2 of their cycles, and 16 + N / 4 of shared memory's.
 * Source     Chetlur et al., cuDNN, 2014, 3; the region in place of the lowered matrix is ours.
 * Tested     tests/kernels/gpu/graph_gemm/test_primitive.py
 */
#include "graph/functions.cuh"
#include "regions.cuh"

/* The last pass: bias, addend, function, and where results go. */
struct End {
    const float* bias;
    const half* addend;
    long long addend_z, addend_y, addend_x;  // values from plane to plane, ..
    half* out;
    long long out_z, out_y, out_x;
    float* sums;  // null, unless there are several parts
    long long step;  // values of out from 16 columns to the next 16
    int function;
    float a, b;
    int wide;  // 8 maps of out, and of the addend, may be copied at once
};

template <int N, int PRODUCTS, int GROUP> struct Multiplier {
    static constexpr int SUMS = N / 2, SLOT = 16 * 16;  // sums of a thread for a product; values staged for 16 columns
    static constexpr int BATCHES = N / 64 * PRODUCTS;   // of 64 columns, whose results are written together
    static constexpr int LAG = 6;                       // groups of steps that one warpgroup is behind the other
    Shared& shared;
    const Layer& n;
    const End& end;
    const int group, warp, lane, line;  // warpgroup; warp of the warpgroup; line of a column that its rows are

    /* Multiplies one item; the rings continue from item to item. One warpgroup begins some groups later than the other, so
     * that one multiplies while the other writes.
     */
    DEVICE void multiply(float (&sums)[PRODUCTS][SUMS], const Item& item, Ring& region, Ring& kernels, int& lag) const {
        unsigned long long columns[PRODUCTS];
        const int together = n.row_bytes / 16;  // pieces of a voxel
        const int apart = (n.along_z * n.stride_z * n.lines + n.along_y * n.stride_y) * n.width + n.along_x;
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
            const Corner at = shared.corners[group * PRODUCTS + i];
            const int offset = (at.z * n.stride_z * n.lines + at.y * n.stride_y) * n.width + at.x;
            columns[i] = wgmma_swizzled(shared.region(n, 0) + offset * n.row_bytes, n.row_bytes, apart * together);
        }
        const unsigned long long rows = wgmma_factor(shared.at<half>(n.kernels), ROWS, PIECE);
        const int4* const offsets = shared.at<const int4>(n.offsets);
        int kernels_before = -1, region_before = -1;  // buffers that the products before read
        int adds = 0;
#pragma unroll 1
        for (int chunk = item.begin; chunk < item.end; ++chunk) {
            barrier_wait(shared.region_filled + region.slot, region.parity);
            const int begin = region.slot * (n.region_bytes / 16);
#pragma unroll 1
            for (int steps = 0; steps < n.groups; ++steps) {
                const int4 four = offsets[steps];
                const int offset[4] = {begin + four.x, begin + four.y, begin + four.z, begin + four.w};
                barrier_wait(shared.kernels_filled + kernels.slot, kernels.parity);
                const unsigned long long factor = rows + kernels.slot * (GROUP * STEP / PIECE);
                wgmma_begin(sums);  // with its end in one block of instructions: else the compiler waits for more
#pragma unroll
                for (int step = 0; step < GROUP; ++step)
#pragma unroll
                    for (int i = 0; i < PRODUCTS; ++i)
                        wgmma_half<N>(sums[i], factor + step * (STEP / PIECE), columns[i] + offset[step], step > 0 || adds);
                wgmma_end();
                wgmma_wait_but_last();
                adds = 1;
                give_back(kernels_before, region_before);
                kernels_before = kernels.slot, region_before = -1;
                kernels.next(n.kept);
                if (--lag == 0 && lane == 0) barrier_arrive(shared.ahead);
            }
            region_before = region.slot;
            region.next(n.regions);
            if (n.regions > 1) continue;
            wgmma_wait();  // the next region has no other buffer
            give_back(kernels_before, region_before);
            kernels_before = region_before = -1;
        }
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) wgmma_wait(sums[i]);
        give_back(kernels_before, region_before);
    }

    /* Hands buffers back that were read; -1: none. */
    DEVICE void give_back(int kernels, int region) const {
        sync_warp();
        if (lane != 0) return;
        if (kernels >= 0) barrier_arrive(shared.kernels_read + kernels);
        if (region >= 0) barrier_arrive(shared.region_read + region);
    }

    /* The sums of a batch: of 8 columns two rows of two, then of the next 8, .. */
    template <int BATCH> DEVICE void copy(float (&values)[32], const float (&sums)[PRODUCTS][SUMS]) const {
        if constexpr (BATCH < BATCHES) {
#pragma unroll
            for (int e = 0; e < 32; ++e) values[e] = sums[BATCH / (N / 64)][BATCH % (N / 64) * 32 + e];
        }
    }
    DEVICE void sums_of(float (&values)[32], const float (&sums)[PRODUCTS][SUMS], int batch) const {
        switch (batch) {  // registers have no numbers at run time
            case 0: copy<0>(values, sums); break;
            case 1: copy<1>(values, sums); break;
            case 2: copy<2>(values, sums); break;
            default: copy<3>(values, sums); break;
        }
    }

    /* The voxel of the first of a batch's columns. */
    DEVICE int3 voxel_of(const Item& item, int batch) const {
        const Corner at = shared.corners[group * PRODUCTS + batch / (N / 64)];
        const int j = batch % (N / 64) * 8;
        return make_int3(item.z + at.z + j * n.along_z, (item.y + at.y + j * n.along_y) * n.lines_at_once + line,
                         item.x + at.x + j * n.along_x);
    }
    /* The voxel j * 8 columns further. */
    DEVICE int3 further(int3 at, int j) const {
        return make_int3(at.x + j * n.along_z, at.y + j * n.along_y * n.lines_at_once, at.z + j * n.along_x);
    }
    DEVICE bool exists(int3 at) const { return (at.x < n.mz) & (at.y < n.my) & (at.z < n.mx); }

    /* Writes the moments of part `number` of `parts` of the voxels, for this warp's maps: of values as they are stored, so
     * that those of an image of one value are exact. WHOLE: all voxels exist.
     */
    template <bool WHOLE>
    DEVICE void gather(const float (&sums)[PRODUCTS][SUMS], const Item& item, int from, float low, float high,
                       double* moments, int number, int parts) const {
        float first[2] = {}, sum[2] = {}, squares[2] = {}, count = 0.0f;  // of two maps, as differences from the first value
#pragma unroll
        for (int batch = 0; batch < BATCHES; ++batch) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                bool there = true, both = true;
                if constexpr (!WHOLE) {
                    int3 at = further(voxel_of(item, batch), j);
                    at.z += lane % 4 * 2;
                    there = exists(at), both = there & at.z + 1 < n.mx;
                }
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const float* const two = sums[batch / (N / 64)] + batch % (N / 64) * 32 + 4 * j + 2 * row;
                    const float add = row == 0 ? low : high;
                    const float2 values = to_float2(to_half2(two[0] + add, two[1] + add));
                    if (there & count == 0.0f) first[row] = values.x;
                    const float one = values.x - first[row], other = values.y - first[row];
                    if (there) sum[row] += one, squares[row] += one * one;
                    if (both) sum[row] += other, squares[row] += other * other;
                }
                count += (there ? 1.0f : 0.0f) + (both ? 1.0f : 0.0f);
            }
        }
        const float share = count > 0.0f ? 1.0f / count : 0.0f, own = count;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float mean = first[row] + sum[row] * share;
            squares[row] -= sum[row] * sum[row] * share, count = own;
            if (squares[row] < 0.0f) squares[row] = 0.0f;  // it was rounded
#pragma unroll
            for (int mask = 1; mask < 4; mask *= 2) {  // four lanes have the same maps
                const float known = shuffle_xor(count, mask), all = count + known, part = all > 0.0f ? known / all : 0.0f;
                const float away = shuffle_xor(mean, mask) - mean, others = shuffle_xor(squares[row], mask);
                mean += away * part, squares[row] += others + away * away * count * part, count = all;
            }
            const int map = from + lane / 4 + row * 8;
            if (lane % 4 != 0 || map >= n.fout) continue;
            double* const to = moments + (long long)map * parts + number;
            to[0] = mean, to[(long long)n.fout * parts] = squares[row];
            if (map == 0) moments[2LL * n.fout * parts + number] = count;
        }
    }

    /* Writes the sums of one part. `from`: the warp's first map. */
    DEVICE void store_sums(const float (&sums)[PRODUCTS][SUMS], const Item& item, int from) const {
        float* const part = end.sums + (long long)item.part * n.mz * n.my * n.mx * n.fout;
        const int map = from + lane / 4;
#pragma unroll 1
        for (int batch = 0; batch < BATCHES; ++batch) {
            float values[32];
            sums_of(values, sums, batch);
            int3 first = voxel_of(item, batch);
            first.z += lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int3 at = further(first, j);
                float* const to = part + (((long long)at.x * n.my + at.y) * n.mx + at.z) * n.fout + map;
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (exists(make_int3(at.x, at.y, at.z + e % 2)) & map + e / 2 * 8 < n.fout)
                        to[e % 2 * n.fout + e / 2 * 8] = values[4 * j + e];
            }
        }
    }

    /* The pieces of the addend that this lane copies in a batch. */
    template <bool WHOLE> DEVICE void addend_of(uint4 (&pieces)[4], const Item& item, int batch, int map, int maps) const {
        const int3 first = own(voxel_of(item, batch));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int3 at = further(first, 2 * i);
            const half* const from =
                end.addend + at.x * end.addend_z + at.y * end.addend_y + at.z * end.addend_x + map;
            pieces[i] = make_uint4(0, 0, 0, 0);
            if constexpr (WHOLE) {
                pieces[i] = __ldg(reinterpret_cast<const uint4*>(from));
            } else if (exists(at)) {
                unsigned both[PIECE / 2] = {};
#pragma unroll
                for (int m = 0; m < PIECE; ++m)
                    if (m < maps)
                        both[m / 2] |= (unsigned)__ldg(reinterpret_cast<const unsigned short*>(from) + m) << 16 * (m % 2);
                pieces[i] = make_uint4(both[0], both[1], both[2], both[3]);
            }
        }
    }

    /* The voxel that this lane copies, one half of its 16 maps, of 16 columns. */
    DEVICE int3 own(int3 first) const {
        const int3 at = further(first, lane / 16);
        return make_int3(at.x, at.y, at.z + lane / 2 % 8);
    }

    /* Applies the function to all values: a few at a time, if it takes many instructions. */
    template <int FUNCTION, int COUNT> DEVICE void apply(float (&values)[COUNT]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = apply_function(values[i], FUNCTION, end.a, end.b);
    }
    DEVICE void apply(float (&values)[32]) const {
        if (end.function == functions::NONE) return;
        if (end.function == functions::RELU) return apply<functions::RELU>(values);
        if (end.function == functions::LEAKY_RELU) return apply<functions::LEAKY_RELU>(values);
#pragma unroll 1
        for (int turn = 0; turn < 8; ++turn) {
            float four[4] = {values[0], values[1], values[2], values[3]};
#pragma unroll
            for (int i = 4; i < 32; ++i) values[i - 4] = values[i];
            switch (end.function) {
                case functions::ELU: apply<functions::ELU>(four); break;
                case functions::SELU: apply<functions::SELU>(four); break;
                case functions::GELU: apply<functions::GELU>(four); break;
                case functions::GELU_TANH: apply<functions::GELU_TANH>(four); break;
                case functions::SILU: apply<functions::SILU>(four); break;
                case functions::SOFTPLUS: apply<functions::SOFTPLUS>(four); break;
                case functions::SIGMOID: apply<functions::SIGMOID>(four); break;
                case functions::TANH: apply<functions::TANH>(four); break;
                case functions::HARDSWISH: apply<functions::HARDSWISH>(four); break;
                default: apply<functions::CLIP>(four); break;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) values[28 + i] = four[i];
        }
    }

    /* Applies what follows to the sums and writes them; returns the largest magnitude. ADDEND: there may be one. WHOLE: all voxels and maps of the
     * item exist, pieces may be copied at once, and the function takes few instructions.
     */
    template <bool WHOLE, bool ADDEND> DEVICE float store(const float (&sums)[PRODUCTS][SUMS], const Item& item, int from, float low,
                                         float high) const {
        const bool has_low = from + lane / 4 < n.fout, has_high = from + lane / 4 + 8 < n.fout;
        const int map = from + lane % 2 * PIECE, maps = min(n.fout - map, PIECE);  // of the piece that this lane copies
        half* const staged = shared.at<half>(n.staged) + (group * (WARPGROUP / WARP) + warp) * 4 * SLOT;
        // This lane copies half of a voxel, and passes a row of the matrices: 16 voxels of 2 pieces.
        const int voxel = lane / 2, row = lane / 16 * 8 + lane % 8;
        half* const mine = staged + voxel * 16 + (lane % 2 ^ (voxel >> 2 & 1)) * PIECE;
        half* const theirs = staged + row * 16 + (lane / 8 % 2 ^ (row >> 2 & 1)) * PIECE;
        uint4 coming[4];
        if (ADDEND && end.addend != nullptr) addend_of<WHOLE>(coming, item, 0, map, maps);
        float largest[4] = {};  // of some of the values each: a single one would be a long chain
#pragma unroll(WHOLE ? BATCHES : 1)
        for (int batch = 0; batch < BATCHES; ++batch) {
            float values[32];
            if constexpr (WHOLE) {
#pragma unroll
                for (int e = 0; e < 32; ++e) values[e] = sums[batch / (N / 64)][batch % (N / 64) * 32 + e];
            } else {
                sums_of(values, sums, batch);
            }
#pragma unroll
            for (int e = 0; e < 32; ++e) values[e] += e % 4 < 2 ? low : high;
            if (ADDEND && end.addend != nullptr) {
#pragma unroll
                for (int i = 0; i < 4; ++i) *reinterpret_cast<uint4*>(mine + i * SLOT) = coming[i];
                sync_warp();
                if (batch + 1 < BATCHES) addend_of<WHOLE>(coming, item, batch + 1, map, maps);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    unsigned words[4];
                    ldmatrix_transposed(words, theirs + i * SLOT);
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float2 pair = to_float2(half2_from_bits(words[e]));
                        values[8 * i + 2 * e] += pair.x, values[8 * i + 2 * e + 1] += pair.y;
                    }
                }
                sync_warp();
            }
            if constexpr (!WHOLE)
                apply(values);
            else if (end.function == functions::RELU)
                apply<functions::RELU>(values);
            else if (end.function == functions::LEAKY_RELU)
                apply<functions::LEAKY_RELU>(values);
            const int3 first = voxel_of(item, batch);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned words[4];
#pragma unroll
                for (int e = 8 * i; e < 8 * i + 8; e += 2) {
                    if constexpr (!WHOLE) {
                        int3 at = further(first, e / 4);
                        at.z += lane % 4 * 2;
                        const bool there = exists(at) & (e % 4 < 2 ? has_low : has_high);
                        largest[i] = larger_magnitude(largest[i], there ? values[e] : 0.0f);
                        largest[i] = larger_magnitude(largest[i], there & at.z + 1 < n.mx ? values[e + 1] : 0.0f);
                    } else {
                        largest[i] = larger_magnitude(larger_magnitude(largest[i], values[e]), values[e + 1]);
                    }
                    words[e / 2 % 4] = bits_of(to_half2(values[e], values[e + 1]));
                }
                stmatrix_transposed(theirs + i * SLOT, words);
            }
            sync_warp();
            const int3 at = own(first);
            half* const to = end.out + at.x * end.out_z + at.y * end.out_y + at.z * end.out_x + map;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (WHOLE || exists(further(at, 2 * i))) write<WHOLE>(to + i * end.step, mine + i * SLOT, maps);
            }
            sync_warp();  // the next values go where these were
        }
        return larger_magnitude(larger_magnitude(largest[0], largest[1]), larger_magnitude(largest[2], largest[3]));
    }

    /* Copies a piece of so many maps. */
    template <bool WHOLE> DEVICE void write(half* to, const half* from, int maps) const {
        if (WHOLE || (end.wide && maps == PIECE)) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
            return;
        }
#pragma unroll
        for (int map = 0; map < PIECE; ++map)
            if (map < maps) to[map] = from[map];
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

template <int N, int PRODUCTS, int GROUP, bool MOMENTS>
__global__ void __launch_bounds__(THREADS, 1) convolve_by_warpgroups(
    INPUT(0), INPUT(1), INPUT(2), INPUT(3), const half* addend, long long addend_z, long long addend_y,
    long long addend_x, half* out, long long out_z, long long out_y, long long out_x, float* sums, double* moments, float* out_peak, const half* kernels, const float* bias, long long inputs,
    long long first_z, long long first_y, long long first_x, long long nz, long long ny, long long nx, long long mz,
    long long my, long long mx, long long fout, long long pieces, long long steps, long long kz, long long ky, long long kx,
    long long stride_z, long long stride_y, long long stride_x, long long apart_z, long long apart_y, long long apart_x,
    long long pz, long long py, long long px, long long tz, long long ty, long long tx, long long tiles_z,
    long long tiles_y, long long tiles_x, long long blocks, long long parts, long long planes, long long lines,
    long long width, long long along_z, long long along_y, long long along_x, long long regions,
    long long kept, long long across, long long lines_at_once, long long step, long long wide, long long function, float a, float b) {
    EXTERN_SHARED_AT(1024, Shared, start);  // then offsets of taps, places of the region's voxels, regions, kernels, staged results
    Shared& shared = *start;
    Layer n;
    n.nz = (int)nz, n.ny = (int)ny, n.nx = (int)nx, n.mz = (int)mz, n.my = (int)my, n.mx = (int)mx, n.fout = (int)fout;
    n.inputs = (int)inputs, n.pieces = (int)pieces, n.row_bytes = 32 * (int)steps, n.chunks = (n.pieces + 2 * (int)steps - 1) / (2 * (int)steps);
    n.across = (int)across;
    n.kz = (int)kz, n.ky = (int)ky, n.kx = (int)kx;
    n.groups = (n.kz * n.ky * n.kx * (int)steps + GROUP - 1) / GROUP;
    n.stride_z = (int)stride_z, n.stride_y = (int)stride_y, n.stride_x = (int)stride_x;
    n.apart_z = (int)apart_z, n.apart_y = (int)apart_y, n.apart_x = (int)apart_x;
    n.pz = (int)pz, n.py = (int)py, n.px = (int)px, n.tz = (int)tz, n.ty = (int)ty, n.tx = (int)tx;
    n.tiles_y = (int)tiles_y, n.tiles_x = (int)tiles_x, n.blocks = (int)blocks, n.parts = (int)parts;
    n.lines = (int)lines, n.width = (int)width, n.residue = n.width / n.stride_x;
    n.rows = (int)(planes * lines * width), n.region_bytes = (n.rows * n.row_bytes + 511) / 512 * 512;
    n.along_z = (int)along_z, n.along_y = (int)along_y, n.along_x = (int)along_x;
    n.regions = (int)regions, n.kept = (int)kept, n.lines_at_once = (int)lines_at_once;
    n.maps = ROWS / n.lines_at_once;
    n.offsets = sizeof(Shared), n.places = n.offsets + n.groups * (int)sizeof(int4);
    n.region = (n.places + n.rows * 4 + 511) / 512 * 512;
    n.kernels = n.region + n.regions * n.region_bytes;
    n.staged = n.kernels + n.kept * GROUP * STEP * (int)sizeof(half);

    if (threadIdx.x == 0) {
        for (int i = 0; i < n.regions; ++i) {
            barrier_begin(shared.region_filled + i, LOADERS);
            barrier_begin(shared.region_read + i, MULTIPLIERS * WARPGROUP / WARP);
        }
        for (int i = 0; i < n.kept; ++i) {
            barrier_begin(shared.kernels_filled + i, 1);
            barrier_begin(shared.kernels_read + i, MULTIPLIERS * WARPGROUP / WARP);
        }
        barrier_begin(shared.ahead, WARPGROUP / WARP);
        barriers_begun();
        shared.inputs[0] = GIVEN(0), shared.inputs[1] = GIVEN(1), shared.inputs[2] = GIVEN(2);
        shared.inputs[3] = GIVEN(3);
    }
    if (threadIdx.x < MULTIPLIERS * PRODUCTS) {
        const int uz = (N / 8 - 1) * n.along_z + 1, uy = (N / 8 - 1) * n.along_y + 1, ux = n.along_x ? N : 8;
        const int i = threadIdx.x, across = n.tx / ux, down = n.ty / uy;
        shared.corners[i] = {i / across / down * uz, i / across % down * uy, i % across * ux, 0};
    }
#pragma unroll 1
    for (int number = threadIdx.x; number < n.groups * 4; number += THREADS) {
        const int all = number / 4 * GROUP + number % 4, tap = min(all / (int)steps, n.kz * n.ky * n.kx - 1);
        const int dx = tap % n.kx * n.apart_x, dy = tap / n.kx % n.ky * n.apart_y, dz = tap / (n.kx * n.ky) * n.apart_z;
        const int row = (dz * n.lines + dy) * n.width + dx % n.stride_x * n.residue + dx / n.stride_x;
        shared.at<int>(n.offsets)[number] = (row * (int)steps + all % (int)steps) * 2;  // kernels behind the last are zeros
    }
    const float by_width = 1.0f / n.width, by_lines = 1.0f / n.lines, by_residue = 1.0f / n.residue;
#pragma unroll 1
    for (int row = threadIdx.x; row < n.rows; row += THREADS) {
        const int all = quotient(row, by_width), at = row - all * n.width, plane = quotient(all, by_lines);
        const int line = all - plane * n.lines, of_residue = quotient(at, by_residue);
        const int column = (at - of_residue * n.residue) * n.stride_x + of_residue;
        shared.at<int>(n.places)[row] = plane << (LINE_BITS + COLUMN_BITS) | line << COLUMN_BITS | column;
    }
    sync_block();

    const int items = (int)tiles_z * n.tiles_y * n.tiles_x * n.blocks * n.parts;
    const int group_of = shuffle((int)threadIdx.x / WARPGROUP, 0);  // uniform, as the compiler sees
    if (group_of == 0) {
        registers_lower<LOADERS_REGISTERS>();
        if (threadIdx.x == 0) bring_kernels<GROUP>(shared, n, kernels, items);
        if (threadIdx.x >= WARP) Loader{shared, n, (int)threadIdx.x - WARP}.bring_regions(items);
    } else {
        registers_raise<MULTIPLIERS_REGISTERS>();
        const End end = {bias,  addend, addend_z, addend_y, addend_x, out, out_z, out_y,
                         out_x, sums,   step,     (int)function, a, b,  (int)wide};
        using Works = Multiplier<N, PRODUCTS, GROUP>;
        const int warp = threadIdx.x / WARP % 4;
        const Works works = {shared, n, end, group_of - 1, warp, (int)threadIdx.x % WARP, warp * 16 / n.maps};
        const int map = warp * 16 % n.maps;  // the first of this warp's rows, in a block
        const int least = n.chunks / n.parts * n.groups;  // groups of steps of an item
        const int lagging = min(min(Works::LAG, (least + 1) / 2), min(n.kept - 1, n.regions * n.groups));
        Ring region, taps;
        int lag = group_of == 1 ? lagging : 0;
        if (group_of == 2) barrier_wait(shared.ahead, 0);
        const bool simple = function == functions::NONE | function == functions::RELU | function == functions::LEAKY_RELU;
        float largest = 0.0f;
#pragma unroll 1
        for (int number = blockIdx.x; number < items; number += gridDim.x) {
            const Item item(n, number);
            const int from = item.block * n.maps + map;
            const float* const biases = bias + from + threadIdx.x % WARP / 4;
            const float low = __ldg(biases), high = __ldg(biases + 8);  // before the products, which take longer
            float all[PRODUCTS][N / 2];
            works.multiply(all, item, region, taps, lag);
            if (from >= n.fout) continue;
            if (sums != nullptr) {
                works.store_sums(all, item, from);
                continue;
            }
            const bool whole = simple & end.wide & from + 16 <= n.fout & item.z + n.tz <= n.mz &
                               (item.y + n.ty) * n.lines_at_once <= n.my & item.x + n.tx <= n.mx;
            if constexpr (MOMENTS) {
                const int at = number / n.blocks * MULTIPLIERS + works.group;
                const int part = at * n.lines_at_once + works.line;
                const int parts = items / n.blocks * MULTIPLIERS * n.lines_at_once;
                if (whole)
                    works.template gather<true>(all, item, from, low, high, moments, part, parts);
                else
                    works.template gather<false>(all, item, from, low, high, moments, part, parts);
            }
            float most;
            if (!whole)
                most = works.template store<false, true>(all, item, from, low, high);
            else if (addend == nullptr)
                most = works.template store<true, false>(all, item, from, low, high);
            else
                most = works.template store<true, true>(all, item, from, low, high);
            largest = larger_magnitude(largest, most);
        }
        raise_peak_by_warp(out_peak, largest);
    }
}

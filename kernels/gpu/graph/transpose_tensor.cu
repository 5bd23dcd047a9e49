/* Transposed convolution whose kernel is as large as its stride, on tensor cores.
 *
 * Computes   out[stride (q + low) - first + d, g] = function(bias[g] + sum over f of x[low + q, f] * kernels[(d, g), f]):
 *            one product of the places q with all taps d side by side, each result of which goes to its voxel.
 * Shapes     x (z, y, x, f) half, any steps between voxels; kernels [columns][chunks * CHUNK] half, a column for each
 *            tap and map, zero-padded in f; maps of a tap are filled up to a multiple of PIECE, and columns to one of
 *            256. 32 neighbours are in the order in which a lane of the product holds 8 of one voxel side by side:
 *            column 8 t + 2 j + e is row 8 j + 2 t + e. bias (pieces * PIECE) float. out in C order.
 * Launch     grid (slices of BN columns, blocks); a block takes every gridDim.y-th tile of BM places. Input comes by
 *            asynchronous copies, STAGES - 1 chunks ahead, also those of the next tile. `kept`: all kernels of the slice
 *            stay in shared memory; else they come with the input.
 * Bound      memory: results are written once, in pieces of 16 bytes, four of them side by side.
 * Exact      float16 products, sums in float32.
 * Tested     tests/kernels/gpu/graph/test_transpose_tensor.py
 */
#include "graph/lines.cuh"

constexpr int CHUNK = 32, PITCH = 40;  // maps of a step; float16 from row to row: 8 rows have no bank conflicts
constexpr int PIECE = 8, PIECES = CHUNK / PIECE;
constexpr int STAGES = 3;
constexpr int GROUP = 4;  // matrices of 8 columns whose values a lane has side by side

struct Scatter {  // as in transpose_tensor.py
    Triple n, places, low, stride, shift, out;  // shift: the output of tap 0 of place 0
    int fin, fout, pieces, columns, chunks;     // pieces: of PIECE maps in a tap; columns: pieces of all taps
    int kept, wide_x, wide_out, function;
    float a, b;
};

struct alignas(8) Row {  // where the first tap of a place goes
    long long at;
    int z, y, x, unused;
};

template <int MT, int NT> DEVICE float& number(float (&sums)[MT][NT][4], int n) {
    return sums[n / 4 / NT][n / 4 % NT][n % 4];
}
template <int MT, int NT> DEVICE void apply_to_all(float (&sums)[MT][NT][4], const Scatter& p) {
    constexpr int COUNT = MT * NT * 4;
    if (p.function == functions::NONE) return;
    if (p.function == functions::RELU) {
#pragma unroll
        for (int n = 0; n < COUNT; ++n) number(sums, n) = apply_function(number(sums, n), functions::RELU, p.a, p.b);
        return;
    }
    if (p.function == functions::LEAKY_RELU) {
#pragma unroll
        for (int n = 0; n < COUNT; ++n) number(sums, n) = apply_function(number(sums, n), functions::LEAKY_RELU, p.a, p.b);
        return;
    }
#pragma unroll 1
    for (int turn = 0; turn < COUNT; turn += PIECE) {  // the code of a long function is there once
        float some[PIECE];
#pragma unroll
        for (int i = 0; i < PIECE; ++i) some[i] = number(sums, i);
#pragma unroll
        for (int i = PIECE; i < COUNT; ++i) number(sums, i - PIECE) = number(sums, i);
        apply_functions(some, p.function, p.a, p.b);
#pragma unroll
        for (int i = 0; i < PIECE; ++i) number(sums, COUNT - PIECE + i) = some[i];
    }
}

template <int WARPS_M, int WARPS_N, int MT, int NT> struct Product {
    static constexpr int THREADS = WARP * WARPS_M * WARPS_N;
    static constexpr int BM = WARPS_M * MT * 16, BN = WARPS_N * NT * 8;
    static constexpr int READ = BM * PIECES / THREADS;  // pieces of the input that a thread copies in a step

    const Input& x;
    const Scatter& p;
    const half* kernels;  // of the slice
    Row* rows;            // shared: STAGES x BM
    half *a, *b;          // shared: STAGES x BM x PITCH; chunks or STAGES x BN x PITCH
    const half* from[READ] = {};

    DEVICE void bring_kernels(half* to, int chunk) const {
        const long long all = (long long)p.chunks * CHUNK;
        for (int i = threadIdx.x; i < BN * PIECES; i += THREADS)
            cp_async<16>(to + i / PIECES * PITCH + i % PIECES * PIECE,
                         kernels + i / PIECES * all + chunk * CHUNK + i % PIECES * PIECE);
    }

    /* Finds the voxels of the places that this thread copies, and where their results go. */
    DEVICE void find(long long tile, Row* table) {
#pragma unroll
        for (int i = 0; i < READ; ++i) {
            const int row = (threadIdx.x + i * THREADS) / PIECES;
            const unsigned number = (unsigned)tile * BM + row, line = number / (unsigned)p.places.x;
            const int qx = number % (unsigned)p.places.x, qy = line % (unsigned)p.places.y, qz = line / (unsigned)p.places.y;
            const int z = p.low.z + qz, y = p.low.y + qy, x_ = p.low.x + qx;
            const bool exists = qz < p.places.z, inside = (unsigned)z < (unsigned)p.n.z &&
                                                          (unsigned)y < (unsigned)p.n.y && (unsigned)x_ < (unsigned)p.n.x;
            from[i] = exists && inside ? voxel_at<half>(x, z, y, x_) : nullptr;
            if (threadIdx.x % PIECES != 0) continue;
            Row found = {0, -(1 << 30), 0, 0, 0};
            if (exists) {
                found.z = p.shift.z + qz * p.stride.z, found.y = p.shift.y + qy * p.stride.y;
                found.x = p.shift.x + qx * p.stride.x;
                found.at = (((long long)found.z * p.out.y + found.y) * p.out.x + found.x) * p.fout;
            }
            table[row] = found;
        }
    }

    DEVICE void bring(int chunk, int stage) const {
        const int f = chunk * CHUNK + threadIdx.x % PIECES * PIECE;
#pragma unroll
        for (int i = 0; i < READ; ++i) {
            const int row = (threadIdx.x + i * THREADS) / PIECES;
            half* const to = a + (stage * BM + row) * PITCH + threadIdx.x % PIECES * PIECE;
            if (p.wide_x) {
                const bool valid = from[i] != nullptr && f < p.fin;
                cp_async<16>(to, valid ? from[i] + f : kernels, valid);
                continue;
            }
#pragma unroll 1
            for (int each = 0; each < PIECE; ++each)
                to[each] = from[i] != nullptr && f + each < p.fin ? from[i][f + each] : to_half(0.0f);
        }
        if (!p.kept) bring_kernels(b + stage * BN * PITCH, chunk);
    }

    /* Adds the products of a chunk. */
    DEVICE void multiply(float (&sums)[MT][NT][4], const half* left, const half* right) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        left += (warp / WARPS_N * MT * 16 + lane % 16) * PITCH + lane / 16 * 8;
        right += (warp % WARPS_N * NT * 8 + lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8;
#pragma unroll
        for (int k = 0; k < CHUNK; k += 16) {
            unsigned of_left[MT][4];
#pragma unroll
            for (int i = 0; i < MT; ++i) ldmatrix(of_left[i], left + i * 16 * PITCH + k);
#pragma unroll
            for (int j = 0; j < NT; j += 2) {
                unsigned two[4];
                ldmatrix(two, right + j * 8 * PITCH + k);
                const unsigned first[2] = {two[0], two[1]}, second[2] = {two[2], two[3]};
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    mma_half(sums[i][j], of_left[i], first);
                    mma_half(sums[i][j + 1], of_left[i], second);
                }
            }
        }
    }

    /* The piece of this lane's columns in a group of matrices. */
    DEVICE int piece_of(int group) const {
        const int column = blockIdx.x * BN + threadIdx.x / WARP % WARPS_N * NT * 8 + group * GROUP * 8;
        return column / PIECE + threadIdx.x % 4;
    }

    DEVICE void begin(float (&sums)[MT][NT][4], const float* bias) const {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            const float* const at = bias + piece_of(j / GROUP) % p.pieces * PIECE + j % GROUP * 2;
            const float2 pair = load_activation2(at);
#pragma unroll
            for (int i = 0; i < MT; ++i)
                sums[i][j][0] = sums[i][j][2] = pair.x, sums[i][j][1] = sums[i][j][3] = pair.y;
        }
    }

    /* Writes the results of a tile; returns the largest |value|, or `largest`. */
    DEVICE float store_all(const float (&sums)[MT][NT][4], const Row* table, half* out, float largest) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
        for (int group = 0; group < NT / GROUP; ++group) {
            const int piece = piece_of(group);
            if (piece >= p.columns) continue;
            const int tap = piece / p.pieces, f = piece % p.pieces * PIECE, known = min(PIECE, p.fout - f);
            const int dx = tap % p.stride.x, dy = tap / p.stride.x % p.stride.y, dz = tap / p.stride.x / p.stride.y;
            half* const to = out + (((long long)dz * p.out.y + dy) * p.out.x + dx) * p.fout + f;
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int high = 0; high < 2; ++high) {
                    const Row row = table[(warp / WARPS_N * MT + i) * 16 + high * 8 + lane / 4];
                    if ((unsigned)(row.z + dz) >= (unsigned)p.out.z || (unsigned)(row.y + dy) >= (unsigned)p.out.y ||
                        (unsigned)(row.x + dx) >= (unsigned)p.out.x)
                        continue;
                    float values[PIECE];
#pragma unroll
                    for (int e = 0; e < PIECE; ++e) values[e] = sums[i][group * GROUP + e / 2][high * 2 + e % 2];
                    if (p.wide_out) {
                        store<half, PIECE>(to + row.at, values);
                        largest = larger_of(largest, values);
                        continue;
                    }
#pragma unroll
                    for (int e = 0; e < PIECE; ++e) {
                        if (e >= known) continue;
                        store_activation(to + row.at + e, values[e]);
                        largest = larger_magnitude(largest, values[e]);
                    }
                }
        }
        return largest;
    }
};

template <int WARPS_M, int WARPS_N, int MT, int NT>
__global__ void __launch_bounds__(WARP* WARPS_M* WARPS_N, WARPS_M* WARPS_N > 4 ? 2 : 4)
    scatter_products(const __grid_constant__ Input x, const __grid_constant__ Scatter p,
                     const half* __restrict__ kernels, const float* __restrict__ bias, half* __restrict__ out, float* peak) {
    using Tile = Product<WARPS_M, WARPS_N, MT, NT>;
    EXTERN_SHARED(Row, rows);
    half* const a = reinterpret_cast<half*>(rows + STAGES * Tile::BM);
    half* const b = a + STAGES * Tile::BM * PITCH;
    Tile product = {x, p, kernels + (long long)blockIdx.x * Tile::BN * p.chunks * CHUNK, rows, a, b};
    const long long places = (long long)p.places.z * p.places.y * p.places.x;
    const int tiles = (int)((places + Tile::BM - 1) / Tile::BM);
    const int mine = (tiles - (int)blockIdx.y + (int)gridDim.y - 1) / (int)gridDim.y, steps = mine * p.chunks;

    int next = 0, next_chunk = 0, next_tile = 0;  // the step that is copied next
    const auto bring_next = [&] {
        if (next < steps) {
            if (next_chunk == 0)
                product.find(blockIdx.y + (long long)next_tile * gridDim.y, rows + next_tile % STAGES * Tile::BM);
            product.bring(next_chunk, next % STAGES);
            if (++next_chunk == p.chunks) next_chunk = 0, ++next_tile;
        }
        ++next;
        cp_async_commit();
    };
    if (p.kept)
        for (int chunk = 0; chunk < p.chunks; ++chunk) product.bring_kernels(b + chunk * Tile::BN * PITCH, chunk);
#pragma unroll 1
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) bring_next();

    float largest = 0.0f;
    int step = 0;
#pragma unroll 1
    for (int tile = 0; tile < mine; ++tile) {
        float sums[MT][NT][4];
        product.begin(sums, bias);
#pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; ++chunk, ++step) {
            cp_async_wait<STAGES - 2>();
            sync_block();  // the step is there, and nobody reads the stage before it any more
            bring_next();
            product.multiply(sums, a + step % STAGES * Tile::BM * PITCH,
                             b + (p.kept ? chunk : step % STAGES) * Tile::BN * PITCH);
        }
        apply_to_all(sums, p);
        largest = product.store_all(sums, rows + tile % STAGES * Tile::BM, out, largest);
    }
    cp_async_wait<0>();
    raise_peak_by_warp(peak, largest);
}

/* Convolution as a product of the lowered matrix with the kernels, on tensor cores; strides and padding.
 *
 * Computes   out[s, i, g] = activation(bias[g] + sum over d, f of x[s, stride i - padding + d, f] * kernels[g, f, d])
 * Shapes     x (S, n, f), out (S, m, f') float or half, images in C order, any number of values apart. kernels [slice
 *            of maps][chunk of maps in][dz][(dy, dx)][word][BN][CHUNK] half times a power of two, zero-padded in maps;
 *            bias (slices * BN) float.
 * Folded     few maps in: 8 voxels of one map and line, from (y, x) on, are multiplied as if they were 8 maps: `groups`
 *            times 8 for kx, all maps, and `step` lines for the next rows of the kernel. Kernels are zero-padded in kx
 *            and ky; a NaN in the input at these zeros reaches the sums.
 * Words      1: values as one float16. 2: as two, h + l, and h H + l H + h L omits less than 2^-21 of a product; only a
 *            few taps are added in sequence (partial_sums.cuh).
 *            float values are scaled by a power of two so that the largest one, *x_peak, stays below 2^14.
 * Launch     A tile: tq x ty x tx output voxels (tq planes, counted through all images), at most BM of them, times BN
 *            maps. For CHUNK maps and one dz a block holds all input voxels of the tile, its region, in shared memory:
 *            the rows of the lowered matrix are rows of the region, different ones for each (dy, dx). While one region
 *            is multiplied the next is loaded through registers, also for the next tile, and kernels are loaded for the
 *            taps of the next round. A block takes every gridDim.x-th tile. grid (blocks, slices).
 * Bound      tensor cores: 2 BM BN CHUNK flops for (MT * WARPS_N + NT * WARPS_M / 2) * 512 bytes of shared memory.
 * Source     Chetlur et al., cuDNN, 2014, 3; the region in place of the lowered matrix is ours.
 * Tested     tests/kernels/gpu/implicit_gemm/test_primitive.py
 */
#include "activation.cuh"
#include "partial_sums.cuh"
#include "operands.cuh"

constexpr int CHUNK = 16;  // maps in, of one product, as in tensor.py
constexpr int MOST_TERMS = 64;  // taps added before their sums are flushed, plus up to one group
constexpr int PITCH = 24;  // float16 from row to row: 8 rows have no bank conflicts; as in tensor.py

/* Parameters of a launch, in shared memory, because the registers are for sums. */
struct alignas(16) Sizes {
    long long before_image, x_image, out_image, outer;  // outer: planes of all images' outputs
    int carried, nz, ny, nx, fin, mz, my, mx, fout, ky, kx, kz, sz, sy, sx, pz, py, px, ty, tx, lines, columns, rows;
    int step, groups, maps, wide_x;  // folded: lines, 8 voxels along x as maps; actual maps, kx; else 1, 1, fin, kx
    float by_lines, by_columns;
    bool wide;  // 8 maps may be read at once
};

static_assert(sizeof(Sizes) == 160, "tensor.py");

/* One of the planes of a tile: the start of windows, as if all planes were there, and the place of results. */
template <class T> struct Plane {
    const T *before, *x;  // null: there is no such plane
    T* out;
    long long z;
    int y0, x0;  // the first voxel of the output
};
constexpr int TABLES = 3;  // tables of planes: a tile's results may still be written while the next but one starts

/* Blocks that share a multiprocessor's registers, as in tensor.py. */
template <int WARPS, int MATRICES> constexpr int RESIDENT = WARPS <= 4 || MATRICES <= 2 ? 2 : 1;

template <class T, int WORDS, int WARPS_M, int WARPS_N, int MT, int NT, bool FOLDED> struct Gemm {
    static constexpr int THREADS = WARP * WARPS_M * WARPS_N;
    static constexpr int BM = WARPS_M * MT * 16, BN = WARPS_N * NT * 8;
    static constexpr int TAP = WORDS * BN;  // rows of kernels of one tap

    // Fragments of the next tap are loaded while the previous ones are multiplied, if registers suffice.
    static constexpr int AHEAD = 4 * MT * NT + 8 * WORDS * (MT + (NT + 1) / 2) <= 160 ? 1 : 0;

    struct Fragments {
        unsigned a[WORDS][MT][4], b[WORDS][AHEAD ? (NT + 1) / 2 : 1][4];
    };

    const Sizes& n;
    Plane<T>* tables;      // shared: TABLES x tq
    half *regions, *taps;  // shared: 2 x WORDS x rows x PITCH; 2 x group x TAP x PITCH
    int tq, tiles_y, tiles_x;
    float scale;

    DEVICE half* region(int stage) const { return regions + (stage & 1) * WORDS * n.rows * PITCH; }

    /* Fills the table of this block's `number`-th tile with its planes. */
    DEVICE void tabulate(long long tile, int number, const T* before, const T* x, T* out) const {
        const long long q0 = tile / tiles_x / tiles_y * tq;
        for (int q = threadIdx.x; q < tq; q += THREADS) {
            const long long at = q0 + q, image = at / n.mz, z = at % n.mz;
            Plane<T>& plane = tables[number % TABLES * tq + q];
            plane.before = before + image * n.before_image;
            plane.x = at < n.outer ? x + image * n.x_image - (long long)n.carried * n.ny * n.nx * n.maps : nullptr;
            plane.out = out + image * n.out_image + z * n.my * n.mx * n.fout;
            plane.z = z * n.sz - n.pz;
            plane.y0 = (int)(tile / tiles_x % tiles_y) * n.ty;
            plane.x0 = (int)(tile % tiles_x) * n.tx;
        }
    }

    DEVICE void fetch(Piece<T>& piece, int index, int stage, const Plane<T>* planes) const {
        const int row = index / 2, c = stage / n.kz * CHUNK + index % 2 * PIECE, dz = stage % n.kz;
        const int all = quotient(row, n.by_columns), column = row - all * n.columns;
        const int q = quotient(all, n.by_lines), line = all - q * n.lines;
        const Plane<T>& plane = planes[q];
        const int group = c / PIECE, wanted = FOLDED ? group % n.groups * PIECE : 0;
        const long long z = plane.z + dz;
        const int y = plane.y0 * n.sy - n.py + line + (FOLDED ? group / (n.groups * n.maps) : 0);
        const int x = plane.x0 * n.sx - n.px + column + wanted;
        const bool inside = plane.x != nullptr && z >= 0 && z < n.nz && y >= 0 && y < n.ny && c < n.fin;
        if (!inside || (!FOLDED && (x < 0 || x >= n.nx))) {
            piece.clear();
            return;
        }
        const long long voxel = (z * n.ny + y) * n.nx + x;
        const T* const from = (z < n.carried ? plane.before : plane.x) + voxel * n.maps;
        if (FOLDED)
            piece.load_line(from + group / n.groups % n.maps, n.maps, -x, min(n.nx - x, n.wide_x - wanted));
        else if (n.wide)
            piece.load(from + c);
        else
            piece.load_line(from + c, 1, 0, n.fin - c);
    }

    DEVICE void put(const Piece<T>& piece, int index, int stage) const {
        piece.template put<WORDS>(region(stage) + index / 2 * PITCH + index % 2 * PIECE, n.rows * PITCH, scale);
    }

    DEVICE void bring_taps(half* to, const half* from, int count) const {
        for (int i = threadIdx.x; i < count * TAP * 2; i += THREADS)
            cp_async<16>(to + i / 2 * PITCH + i % 2 * PIECE, from + i * PIECE);
        cp_async_commit();
    }

    /* Loads the fragments of a tap: `rows` is its place in the region, `kernels` its kernels, for this lane. */
    DEVICE void load(Fragments& f, const half* rows, const int (&voxels)[MT], const half* kernels) const {
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
#pragma unroll
            for (int i = 0; i < MT; ++i) ldmatrix(f.a[word][i], rows + word * n.rows * PITCH + voxels[i]);
        }
        if constexpr (AHEAD) {  // otherwise kernels are loaded as they are multiplied
#pragma unroll
            for (int j = 0; j < NT; j += 2) load_kernels(f, j, kernels);
        }
    }

    /* Loads kernels of 16 maps, or the last 8. */
    DEVICE void load_kernels(Fragments& f, int j, const half* kernels) const {
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            const half* const at = kernels + (word * BN + j * 8) * PITCH;
            unsigned (&words)[4] = f.b[word][AHEAD * (j / 2)];
            if (j + 1 < NT) {
                ldmatrix(words, at);
            } else {
                unsigned two[2];
                ldmatrix(two, at);
                words[0] = two[0], words[1] = two[1];
            }
        }
    }

    DEVICE void multiply(float (&sums)[MT][NT][4], Fragments& f, const half* kernels) const {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            if (!AHEAD && j % 2 == 0) load_kernels(f, j, kernels);
            const int pair = AHEAD * (j / 2), low = j % 2 * 2;
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                if (WORDS == 1) {
                    mma_half(sums[i][j], f.a[0][i], {f.b[0][pair][low], f.b[0][pair][low + 1]});
                    continue;
                }
                // The small terms first. Tensor cores truncate their sums, so long sums are accumulated outside of
                // them.
                float sum[4] = {};
                mma_half(sum, f.a[WORDS - 1][i], {f.b[0][pair][low], f.b[0][pair][low + 1]});
                mma_half(sum, f.a[0][i], {f.b[WORDS - 1][pair][low], f.b[WORDS - 1][pair][low + 1]});
                mma_half(sum, f.a[0][i], {f.b[0][pair][low], f.b[0][pair][low + 1]});
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[i][j][e] += sum[e];
            }
        }
    }

    /* The row of the region where the window of a tile's m-th voxel starts. */
    DEVICE int row_of(int m) const {
        const int x = m % n.tx, y = m / n.tx % n.ty, q = m / (n.tx * n.ty);
        const int row = (q * n.lines + y * n.sy) * n.columns + x * n.sx;
        return row < n.rows ? row : 0;  // voxels beyond the last plane of the tile are not written
    }

    /* Loads the first region and the first kernels. */
    DEVICE void begin(const half* kernels, int group, const Plane<T>* planes) const {
        Piece<T> piece;
        for (int index = threadIdx.x; index < 2 * n.rows; index += THREADS) {
            fetch(piece, index, 0, planes);
            put(piece, index, 0);
        }
        bring_taps(taps, kernels, min(group, n.ky * n.kx));
    }

    /* Computes the sums of a tile, whose first region and kernels are loaded or in flight. `stage` and `round` continue
     * from tile to tile; `next`: planes of the next tile, null if there is none.
     */
    DEVICE void run(float (&sums)[MT][NT][4], const half* kernels, const int* offsets, int group, int& stage, int& round,
                    const Plane<T>* planes, const Plane<T>* next) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const int stages = n.kz * ((n.fin + CHUNK - 1) / CHUNK), all = n.ky * n.kx, pieces = 2 * n.rows;
        int voxels[MT];
#pragma unroll
        for (int i = 0; i < MT; ++i) voxels[i] = row_of((warp / WARPS_N * MT + i) * 16 + lane % 16) * PITCH;
        const half* const own = taps + (warp % WARPS_N * NT * 8 + lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8;
        const int buffer = group * TAP * PITCH;
        const half* coming = kernels;
        Piece<T> piece;
        PartialSums<MT * NT * 4> partial;
        int terms = 0;  // terms of every sum since the last flush
        bool keeps = false;
#pragma unroll 1
        for (int done = 0; done < stages; ++done, ++stage) {
            const half* const rows = region(stage) + lane / 16 * 8;
            const bool last = done + 1 == stages, more = !last || next != nullptr;
            const Plane<T>* const behind = last ? next : planes;
            const int following = last ? 0 : done + 1;
            int index = threadIdx.x;
#pragma unroll 1
            for (int first = 0; first < all; first += group, ++round) {
                const int count = min(group, all - first), left = all - first - count;
                cp_async_wait<0>();
                sync_block();
                coming = left == 0 && last ? kernels : coming + count * TAP * CHUNK;
                if (left > 0 || more) bring_taps(taps + ((round + 1) & 1) * buffer, coming, min(group, left > 0 ? left : all));
                const half* const at = own + (round & 1) * buffer;
                Fragments f[1 + AHEAD];
                if (AHEAD) load(f[0], rows + offsets[first], voxels, at);
#pragma unroll 1
                for (int tap = 0; tap < count; tap += 2) {
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd) {
                        const int now = tap + odd, wanted = now + AHEAD;
                        if (now >= count) break;
                        const bool brings = more && index < pieces;
                        if (brings) fetch(piece, index, following, behind);
                        if (wanted < count)
                            load(f[AHEAD * (1 - odd)], rows + offsets[first + wanted], voxels, at + wanted * TAP * PITCH);
                        multiply(sums, f[AHEAD * odd], at + now * TAP * PITCH);
                        if (brings) put(piece, index, stage + 1);
                        index += THREADS;
                    }
                }
                terms += count;
                if (WORDS == 2 && terms >= MOST_TERMS) {
                    partial.flush(sums[0][0], !keeps);
                    keeps = true, terms = 0;
                }
            }
            for (; more && index < pieces; index += THREADS) {
                fetch(piece, index, following, behind);
                put(piece, index, stage + 1);
            }
        }
        if (keeps) partial.add_to(sums[0][0]);
    }

    /* Pairs: two maps may be written at once. */
    DEVICE float store(const float (&sums)[MT][NT][4], const Plane<T>* planes, const float* bias, float unscale,
                       int activation, bool pairs) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
        const int first = blockIdx.y * BN + warp % WARPS_N * NT * 8 + 2 * t;
        const float back = 1.0f / scale;  // two factors: their product may underflow
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int m = (warp / WARPS_N * MT + i) * 16 + h * 8 + g;
                const int q = m / (n.tx * n.ty);
                if (q >= tq || planes[q].x == nullptr) continue;
                const int x = planes[q].x0 + m % n.tx, y = planes[q].y0 + m / n.tx % n.ty;
                if (x >= n.mx || y >= n.my) continue;
                T* const to = planes[q].out + ((long long)y * n.mx + x) * n.fout;
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    const int map = first + j * 8;
                    if (map >= n.fout) continue;
                    const float a = activate(back * (unscale * sums[i][j][2 * h]) + bias[map], activation);
                    const float b = activate(back * (unscale * sums[i][j][2 * h + 1]) + bias[map + 1], activation);
                    largest = larger_magnitude(largest, a);
                    if (map + 1 < n.fout) largest = larger_magnitude(largest, b);
                    if (pairs) {
                        store_activation2(to + map, make_float2(a, b));
                    } else {
                        store_activation(to + map, a);
                        if (map + 1 < n.fout) store_activation(to + map + 1, b);
                    }
                }
            }
        return largest;
    }
};

template <class T, int WORDS, int WARPS_M, int WARPS_N, int MT, int NT, bool FOLDED>
__global__ void __launch_bounds__(WARP* WARPS_M* WARPS_N, RESIDENT<WARPS_M * WARPS_N, MT * NT>)
    gemm(const T* before, long long before_image, const T* x, long long x_image, T* out, long long out_image,
         const half* kernels, const float* bias, float unscale, const float* x_peak, float* out_peak, long long images,
         long long carried, long long nz, long long ny, long long nx, long long fin, long long mz, long long my, long long mx,
         long long fout, long long kz, long long ky, long long kx, long long sz, long long sy, long long sx, long long pz,
         long long py, long long px, long long step, long long groups, long long maps, long long wide_x, long long tq,
         long long ty, long long tx, long long group, long long wide, long long pairs, long long activation) {
    using Product = Gemm<T, WORDS, WARPS_M, WARPS_N, MT, NT, FOLDED>;
    EXTERN_SHARED(Sizes, shared);  // then planes [TABLES][tq], offsets of taps in the region, regions, kernels of taps
    const Sizes& n = *shared;
    if (threadIdx.x == 0) {
        const int lines = ((int)ty - 1) * (int)sy + ((int)ky - 1) * (int)step + 1, columns = ((int)tx - 1) * (int)sx + (int)kx;
        *shared = {before_image, x_image, out_image, images * mz,
                   (int)carried, (int)nz, (int)ny, (int)nx, (int)fin, (int)mz, (int)my, (int)mx, (int)fout, (int)ky,
                   (int)kx, (int)kz, (int)sz, (int)sy, (int)sx, (int)pz, (int)py, (int)px, (int)ty, (int)tx, lines,
                   columns, (int)tq * lines * columns, (int)step, (int)groups, (int)maps, (int)wide_x,
                   1.0f / lines, 1.0f / columns, wide != 0};
    }
    sync_block();
    Plane<T>* const tables = reinterpret_cast<Plane<T>*>(shared + 1);
    int* const offsets = reinterpret_cast<int*>(tables + TABLES * ((tq + 1) / 2 * 2));
    half* const regions = reinterpret_cast<half*>(offsets + (ky * kx + 3) / 4 * 4);
    for (int tap = threadIdx.x; tap < ky * kx; tap += Product::THREADS)
        offsets[tap] = (tap / n.kx * n.step * n.columns + tap % n.kx) * PITCH;
    const float scale = WORDS == 1 && sizeof(T) == 2 ? 1.0f : scale_of(x_peak);
    const int tiles_y = (n.my + n.ty - 1) / n.ty, tiles_x = (n.mx + n.tx - 1) / n.tx;
    const Product product = {n, tables, regions, regions + 2 * WORDS * n.rows * PITCH, (int)tq, tiles_y, tiles_x, scale};
    const long long tiles = (n.outer + tq - 1) / tq * tiles_y * tiles_x;
    const int chunks = (n.fin + CHUNK - 1) / CHUNK;
    kernels += (long long)blockIdx.y * chunks * n.kz * n.ky * n.kx * Product::TAP * CHUNK;

    product.tabulate(blockIdx.x, 0, before, x, out);
    sync_block();
    product.begin(kernels, (int)group, tables);
    int stage = 0, round = 0, number = 0;
    float largest = 0.0f;
#pragma unroll 1
    for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++number) {
        const bool more = tile + gridDim.x < tiles;
        if (more) product.tabulate(tile + gridDim.x, number + 1, before, x, out);
        const Plane<T>* const planes = tables + number % TABLES * tq;
        float sums[MT][NT][4] = {};
        product.run(sums, kernels, offsets, (int)group, stage, round, planes,
                    more ? tables + (number + 1) % TABLES * tq : nullptr);
        largest = larger_magnitude(largest, product.store(sums, planes, bias, unscale, (int)activation, pairs != 0));
    }
    raise_peak_by_warp(out_peak, largest);
}

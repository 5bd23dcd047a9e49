/* Loading of a tile's input region to shared memory: pieces of 8 values, voxel after voxel.
 *
 * Source  ours; see warpgroup.cu
 * Tested  tests/kernels/gpu/implicit_gemm/test_warpgroup.py
 */
#pragma once

#include "operands.cuh"
#include "wgmma.cuh"

constexpr int WARPGROUPS = 2, THREADS = WARPGROUPS * WARPGROUP;  // as in warpgroup.py
constexpr int MATRIX = 64;                                       // voxels of a matrix
constexpr int AT_ONCE = 2;                                       // pieces that a thread loads at once through registers
constexpr int COPIES = 2;                                        // pieces that it copies at once without registers

/* Parameters of a launch, in shared memory, because the registers are for sums. */
struct alignas(16) Sizes {
    long long before_image, x_image, out_image;
    Arrival arrivals[2];  // arrivals of kernels of a group of taps, for either half of their buffer
    int carried, nz, ny, nx, fin, mz, my, mx, fout, images, kz, pz, py, px, wide_x;
    int tz, ty, tx;                       // size of a tile
    int row_z, row_y, row_x;              // steps from one row of 8 voxels of a matrix to the next
    int lines, columns, rows;             // size of the region
    int deep, pieces;                     // stages of the same maps; pieces of a voxel
    int flat;                             // whether planes of all images form one row
    int tiles_z, tiles_y, tiles_x;
    int tiles, origins, offsets, places, firsts, regions, taps, results;  // offsets in bytes from here on
    int staged;  // rows of 8 voxels of out that a warp stages in shared memory at once
    float by_pieces, by_tiles_x, by_tiles_y, by_tiles_z, by_mz;
    bool wide;       // 8 maps may be read at once
    bool remembers;  // whether origins of rows are stored, since stages have the same voxels
};
static_assert(sizeof(Sizes) == 224, "warpgroup.py");

/* Bounds of the loops around products: from the launch's parameters, so that the compiler sees them as uniform. */
struct Loops {
    int stages, taps, group, groups;
    bool straight;  // pieces are copied to the region without a thread's registers
};

/* One tile: its first voxel, followed by the addresses of its input planes (null: none) and of its output planes. */
struct Tile {
    int y, x;
    template <class T> DEVICE T** planes() { return reinterpret_cast<T**>(this + 1); }
};
static_assert(sizeof(Tile) == sizeof(void*), "warpgroup.py");

/* A row of the region: plane, line and column in a word. Half of shared memory holds fewer than 2^12 rows, of which a
 * line has 8 or more.
 */
constexpr int LINE_BITS = 9, COLUMN_BITS = 12;
constexpr int TILES = 3;  // known at once: the current one, the next, and the one before or after

/* The first map and the dz of a stage of a tile. */
struct Stage {
    int map, dz;
};

template <class T, int WORDS, int N, bool FOLDED> struct Region {
    static constexpr int TAP = WORDS * 2 * N * PIECE;  // half values of kernels

    Sizes& n;
    const Loops loops;
    float scale;
    const T* nothing;  // an address for copies of zeros

    // The arrays after `n` in shared memory: their addresses are read again, because the registers are for sums.
    template <class V> DEVICE V* at(int bytes) const {
        return reinterpret_cast<V*>(reinterpret_cast<unsigned char*>(&n) + bytes);
    }
    DEVICE int* offsets() const { return at<int>(n.offsets); }            // offsets of taps in the region, in pieces
    DEVICE int* places() const { return at<int>(n.places); }              // places of rows of the region
    DEVICE const T** origins() const { return at<const T*>(n.origins); }  // origins of rows, if n.remembers
    DEVICE int3* firsts() const { return at<int3>(n.firsts); }            // first voxels of matrices in it: z, y, x
    DEVICE half* taps(int round) const { return at<half>(n.taps) + (round & 1) * loops.group * TAP; }
    DEVICE half* region(int stage) const {
        return at<half>(n.regions) + (stage & 1) * WORDS * n.pieces * n.rows * PIECE;
    }

    DEVICE int planes_in() const { return n.tz + n.kz - 1; }
    DEVICE Tile& tile(int slot) const { return at<Tile>(n.tiles)[slot * (1 + planes_in() + n.tz)]; }

    DEVICE void tabulate(int number, Tile& to, const T* before, const T* x, T* out) const {
        const int in = planes_in(), planes = in + n.tz;
        if ((int)threadIdx.x >= planes) return;
        const int all = divided(number, n.tiles_x, n.by_tiles_x), along_z = divided(all, n.tiles_y, n.by_tiles_y);
        const int first_image = n.flat ? 0 : divided(along_z, n.tiles_z, n.by_tiles_z);
        const int z0 = (n.flat ? along_z : along_z - first_image * n.tiles_z) * n.tz;
        for (int i = threadIdx.x; i < planes; i += THREADS) {
            const int at = z0 + (i < in ? i : i - in), image = n.flat ? divided(at, n.mz, n.by_mz) : first_image;
            const int z = n.flat ? at - image * n.mz : at;
            if (i < in) {
                const int plane = z - n.pz;
                const bool there = image < n.images && plane >= 0 && plane < n.nz;
                const long long size = (long long)n.ny * n.nx * n.fin;
                const T* const from = plane < n.carried ? before + image * n.before_image
                                                        : x + image * n.x_image - n.carried * size;
                to.planes<const T>()[i] = there ? from + plane * size : nullptr;
            } else {
                const long long size = (long long)n.my * n.mx * n.fout;
                to.planes<T>()[i] = image < n.images && z < n.mz ? out + image * n.out_image + z * size : nullptr;
            }
        }
        if (threadIdx.x == 0) to.y = (all - along_z * n.tiles_y) * n.ty, to.x = (number - all * n.tiles_x) * n.tx;
    }

    /* The source of a piece of a stage's region; null: zeros. `x`: the voxel, if FOLDED. Whoever requests a row in a
     * tile's first stage stores the origin for later stages: several threads may, and store the same.
     */
    DEVICE const T* origin(int index, Stage stage, Tile& tile, int& row, int& piece, int& x) const {
        row = quotient(index, n.by_pieces), piece = index - row * n.pieces;
        const int map = stage.map + (FOLDED ? piece : piece * PIECE);
        const T* from;
        if (!FOLDED && n.remembers && stage.map > 0) {
            from = origins()[row];
        } else {
            const int at = places()[row];
            const T* const plane = tile.planes<const T>()[(at >> (LINE_BITS + COLUMN_BITS)) + stage.dz];
            const int y = tile.y - n.py + ((at >> COLUMN_BITS) & ((1 << LINE_BITS) - 1));
            x = tile.x - n.px + (at & ((1 << COLUMN_BITS) - 1));
            const bool inside = (unsigned)y < (unsigned)n.ny & (FOLDED | (unsigned)x < (unsigned)n.nx);
            const long long offset = ((long long)y * n.nx + x) * n.fin;
            from = inside & plane != nullptr ? plane + offset : nullptr;  // no branches: many loads at once
            if (!FOLDED && n.remembers) origins()[row] = from;
        }
        return from != nullptr & map < n.fin ? from + map : nullptr;
    }

    DEVICE Stage stage_of(int stage) const {
        const int chunk = n.deep == 1 ? stage : stage / n.deep;
        return {chunk * n.pieces * (FOLDED ? 1 : PIECE), stage - chunk * n.deep};
    }

    DEVICE half* place(int stage, int row, int piece) const { return region(stage) + (piece * n.rows + row) * PIECE; }

    /* Copies pieces of the region of stage `to`, every THREADS-th from `index` on, `last` excluded. */
    DEVICE void copy(int index, int last, int to, Stage stage, Tile& tile) const {
        for (; index < last; index += COPIES * THREADS) {
            const T* from[COPIES];
            half* to_piece[COPIES];
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                int row, piece, x;
                from[i] = origin(min(index + i * THREADS, last - 1), stage, tile, row, piece, x);
                to_piece[i] = place(to, row, piece);
            }
#pragma unroll
            for (int i = 0; i < COPIES; ++i)
                if (index + i * THREADS < last)
                    cp_async<16>(to_piece[i], from[i] == nullptr ? nothing : from[i], from[i] != nullptr);
        }
    }

    /* Copies like `copy`, but through registers: `bring` reads, `put` writes. */
    DEVICE void bring(Piece<T, FOLDED> (&pieces)[AT_ONCE], int index, int last, Stage stage, Tile& tile) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i, index += THREADS) {
            if (index >= last) break;
            int row, piece, x;
            const T* const from = origin(index, stage, tile, row, piece, x);
            if constexpr (FOLDED) {
                pieces[i].load_line(from, n.fin, -x, from == nullptr ? 0 : min(n.nx - x, n.wide_x));
            } else if (n.wide) {
                if (from == nullptr)
                    pieces[i].clear();
                else
                    pieces[i].load(from);
            } else {
                pieces[i].load_line(from, 1, 0, from == nullptr ? 0 : n.fin - stage.map - piece * PIECE);
            }
        }
    }

    DEVICE void put(const Piece<T, FOLDED> (&pieces)[AT_ONCE], int index, int last, int to) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i, index += THREADS) {
            if (index >= last) break;
            const int row = quotient(index, n.by_pieces);
            pieces[i].template put<WORDS>(place(to, row, index - row * n.pieces), n.pieces * n.rows * PIECE, scale);
        }
    }

    DEVICE void bring_taps(int round, const half* from, int count) const {
        if (threadIdx.x == 0)
            bulk_load(taps(round), from, count * TAP * (int)sizeof(half), n.arrivals + (round & 1));
    }
};

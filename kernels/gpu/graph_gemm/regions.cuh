/* Layers of graphs as products on the tensor cores of sm_90a: sizes, and the warps that bring inputs and kernels.
 *
 * Tested  tests/kernels/gpu/graph_gemm/test_primitive.py
 */
#pragma once

#include "pipeline.cuh"

constexpr int ROWS = 64;                               // of a product: maps of out, for one or several lines
constexpr int PIECE = 8;                               // maps that are copied at once
constexpr int STEP = 2 * ROWS * PIECE;                 // half values of the kernels of a tap, for 16 maps
constexpr int MULTIPLIERS = 2;                         // warpgroups that multiply
constexpr int THREADS = (1 + MULTIPLIERS) * WARPGROUP; // and one that loads
constexpr int LOADERS = WARPGROUP - WARP;              // threads of it that bring inputs; a warp brings kernels
constexpr int LOADERS_REGISTERS = 88, MULTIPLIERS_REGISTERS = 208;  // of a thread; together those of a block of 168
constexpr int MOST_PRODUCTS = 4;                       // of a warpgroup
constexpr int MOST_INPUTS = 4, MOST_REGIONS = 4, MOST_GROUPS = 16;  // buffers
constexpr int AT_ONCE = 8;                             // values that a thread loads at once through registers
constexpr int COPIES = 6;                              // pieces that it copies at once without registers
constexpr int LINE_BITS = 10, COLUMN_BITS = 10;        // of a place in the region

/* An input: its values, the values from plane to plane, line to line, voxel to voxel, and how often a voxel counts. */
struct Input {
    const half* values;
    long long z, y, x;
    int maps, first_z, first_y, first_x, by_z, by_y, by_x;  // by: logarithms
    int wide;                                                // 8 maps may be copied at once
};
struct Corner {  // the first column of a product in its tile
    int z, y, x, unused;
};

/* n / d for 0 <= n < 2^20, by 1 / d. */
DEVICE int quotient(int n, float reciprocal) { return (int)((n + 0.5f) * reciprocal); }

/* The sizes of a layer and of its division. Those of tiles are in columns: a column is `lines_at_once` voxels of out, one above
 * the other along y.
 */
struct Layer {
    int nz, ny, nx, mz, my, mx, fout, inputs, pieces, chunks;
    int kz, ky, kx;                       // taps of columns
    int stride_z, stride_y, stride_x;     // from column to column
    int apart_z, apart_y, apart_x;        // from tap to tap
    int pz, py, px;
    int tz, ty, tx;                       // a tile, in columns
    int tiles_y, tiles_x, blocks, parts;  // blocks of maps; parts of the sum
    int lines, width, residue;            // the region: lines of a plane, voxels of a line, and of each residue of x
    int rows, row_bytes, region_bytes;    // its voxels, the bytes of a voxel's chunk of maps, the bytes of a buffer
    int along_z, along_y, along_x;        // from 8 columns of a product to the next 8
    int groups;                           // of steps, of a chunk: its taps, for each 16 maps
    int regions, kept;                    // buffers of regions, and of the kernels of groups
    int across;                           // taps along x whose inputs are maps of one voxel, one tap after the other
    int lines_at_once, maps;              // voxels of a column; maps of a block
    int offsets, places, region, kernels, staged;  // bytes from the start of shared memory
};

/* A tile, its block of maps and its part of the sum. */
struct Item {
    int block, part, z, y, x, begin, end;  // of chunks

    DEVICE Item(const Layer& n, int number) {
        block = number % n.blocks, number /= n.blocks;
        part = number % n.parts, number /= n.parts;
        x = number % n.tiles_x * n.tx, number /= n.tiles_x;
        y = number % n.tiles_y * n.ty, z = number / n.tiles_y * n.tz;
        begin = n.chunks * part / n.parts, end = n.chunks * (part + 1) / n.parts;
    }
};

/* The start of shared memory. */
struct alignas(16) Shared {
    Barrier region_filled[MOST_REGIONS], region_read[MOST_REGIONS], kernels_filled[MOST_GROUPS],
        kernels_read[MOST_GROUPS], ahead[2];  // ahead[0]: the first warpgroup multiplied for a while; [1] only fills
    Input inputs[MOST_INPUTS];
    Corner corners[2 * MOST_PRODUCTS];

    template <class T> DEVICE T* at(int bytes) {
        return reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(this) + bytes);
    }
    DEVICE unsigned char* region(const Layer& n, int slot) { return at<unsigned char>(n.region + slot * n.region_bytes); }
};
static_assert(sizeof(Shared) == 720, "plan.py");

/* A buffer of a ring, and the parity of the phase in which it is used. */
struct Ring {
    int slot = 0, parity = 0;
    DEVICE void next(int slots) {
        if (++slot == slots) slot = 0, parity ^= 1;
    }
};

/* Brings the kernels of all items of this block, GROUP steps at once, one thread. */
template <int GROUP> DEVICE void bring_kernels(Shared& shared, const Layer& n, const half* kernels, int items) {
    constexpr int VALUES = GROUP * STEP;
    half* const to = shared.at<half>(n.kernels);
    Ring ring;
#pragma unroll 1
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
        const Item item(n, number);
        const half* from = kernels + ((long long)item.block * n.chunks + item.begin) * n.groups * VALUES;
        const int groups = (item.end - item.begin) * n.groups;
#pragma unroll 1
        for (int group = 0; group < groups; ++group, from += VALUES) {
            barrier_wait(shared.kernels_read + ring.slot, ring.parity ^ 1);
            barrier_load(to + ring.slot * VALUES, from, VALUES * (int)sizeof(half), shared.kernels_filled + ring.slot);
            ring.next(n.kept);
        }
    }
}

/* One thread's share of regions: pieces of some voxels. */
struct Loader {
    Shared& shared;
    const Layer& n;
    const int thread;  // 0 to LOADERS - 1

    /* The voxel at a place of the region that begins at z, y, x, and whether there is one; x becomes the voxel's. */
    DEVICE const half* source(const Input& in, int place, int z, int y, int& x, bool& there) const {
        z += place >> (LINE_BITS + COLUMN_BITS);
        y += place >> COLUMN_BITS & ((1 << LINE_BITS) - 1);
        x += place & ((1 << COLUMN_BITS) - 1);
        there = (unsigned)z < (unsigned)n.nz & (unsigned)y < (unsigned)n.ny;
        return in.values + ((z + in.first_z) >> in.by_z) * in.z + ((y + in.first_y) >> in.by_y) * in.y +
               ((x + in.first_x) >> in.by_x) * in.x;
    }

    /* The place of a piece of a voxel in a buffer. */
    DEVICE uint4* piece_of(unsigned char* to, int row, int piece) const {
        return reinterpret_cast<uint4*>(to + swizzled(row * n.row_bytes + piece * 16, n.row_bytes));
    }

    DEVICE void load(unsigned char* to, int chunk, int z, int y, int x) const {
        const int together = n.row_bytes / 16, begin = together * chunk;  // pieces of a voxel
        const bool lone = together == 2 & begin + 1 == n.pieces;          // all threads load the first piece
        const int mine = lone ? 0 : thread % together, first = lone ? thread : thread / together;
        const int step = lone ? LOADERS : LOADERS / together;
        if (lone | begin + mine >= n.pieces) {
#pragma unroll 1
            for (int row = first; row < n.rows; row += step) *piece_of(to, row, lone ? 1 : mine) = make_uint4(0, 0, 0, 0);
            if (!lone) return;
        }
        int piece = begin + mine, input = 0;
        for (; input < n.inputs - 1; ++input) {
            const int pieces = (shared.inputs[input].maps + PIECE - 1) / PIECE;
            if (piece < pieces) break;
            piece -= pieces;
        }
        Input in = shared.inputs[input];
        const int maps = min(in.maps * n.across - piece * PIECE, PIECE);
        if (in.wide) {
            const int* const places = shared.at<const int>(n.places);
            in.values += piece * PIECE;
#pragma unroll 1
            for (int row = first; row < n.rows; row += COPIES * step) {
                const half* from[COPIES];
                bool there[COPIES];
#pragma unroll
                for (int i = 0; i < COPIES; ++i) {  // all addresses, then all copies, in whose order the compiler is bound
                    int at = x;
                    from[i] = source(in, places[min(row + i * step, n.rows - 1)], z, y, at, there[i]);
                    there[i] = there[i] & (unsigned)at < (unsigned)n.nx;
                }
#pragma unroll
                for (int i = 0; i < COPIES; ++i)
                    if (row + i * step < n.rows)
                        cp_async<16>(piece_of(to, row + i * step, mine), there[i] ? from[i] : in.values, there[i]);
            }
        } else if (maps <= 1) {
            load_maps<1>(to, mine, in, piece * PIECE, maps, first, step, z, y, x);
        } else if (maps <= 4) {
            load_maps<4>(to, mine, in, piece * PIECE, maps, first, step, z, y, x);
        } else {
            load_maps<8>(to, mine, in, piece * PIECE, maps, first, step, z, y, x);
        }
    }

    /* Loads up to MAPS values of each voxel, one by one; map m of a voxel is map m % in.maps of the voxel m / in.maps taps
     * further along x.
     */
    template <int MAPS>
    DEVICE void load_maps(unsigned char* to, int piece, const Input& in, int from_map, int maps, int first, int step, int z,
                          int y, int x) const {
        constexpr int TOGETHER = AT_ONCE / MAPS;
        const int* const places = shared.at<const int>(n.places);
        const int begin = n.across > 1 ? from_map / in.maps : 0;  // tap of the first map
#pragma unroll 1
        for (int row = first; row < n.rows; row += TOGETHER * step) {
            unsigned short values[TOGETHER][MAPS];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int at = row + i * step;
                bool there;
                int voxel = x;
                const half* from = source(in, places[min(at, n.rows - 1)], z, y, voxel, there);
                there = there & at < n.rows;
                int map = from_map - begin * in.maps, tap = begin * n.apart_x;
#pragma unroll
                for (int m = 0; m < MAPS; ++m) {
                    const bool inside = there & m < maps & (unsigned)(voxel + tap) < (unsigned)n.nx;
                    const half* const value = from + tap * in.x + map;
                    values[i][m] = inside ? __ldg(reinterpret_cast<const unsigned short*>(value)) : 0;
                    if (++map == in.maps && n.across > 1) map = 0, tap += n.apart_x;
                }
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                unsigned both[PIECE / 2] = {};
#pragma unroll
                for (int m = 0; m < MAPS; ++m) both[m / 2] |= (unsigned)values[i][m] << 16 * (m % 2);
                if (row + i * step < n.rows)
                    *piece_of(to, row + i * step, piece) = make_uint4(both[0], both[1], both[2], both[3]);
            }
        }
    }

    /* Hands over a region whose copies are complete. */
    DEVICE void hand_over(int slot) const {
        wgmma_publish();
        barrier_arrive(shared.region_filled + slot);
    }

    /* Brings the regions of all items: the next one is on its way while the copies of one are waited for, if its buffer
     * is free by then.
     */
    DEVICE void bring_regions(int items) const {
        Ring ring;
        int before = -1;  // the buffer whose copies were not waited for
#pragma unroll 1
        for (int number = blockIdx.x; number < items; number += gridDim.x) {
            const Item item(n, number);
            const int z = item.z * n.stride_z - n.pz, y = item.y * n.stride_y - n.py, x = item.x * n.stride_x - n.px;
#pragma unroll 1
            for (int chunk = item.begin; chunk < item.end; ++chunk) {
                if (before >= 0 && !barrier_passed(shared.region_read + ring.slot, ring.parity ^ 1)) {
                    cp_async_wait<0>();
                    hand_over(before);
                    before = -1;
                }
                barrier_wait(shared.region_read + ring.slot, ring.parity ^ 1);
                load(shared.region(n, ring.slot), chunk, z, y, x);
                cp_async_commit();
                if (before >= 0) {
                    cp_async_wait<1>();
                    hand_over(before);
                }
                before = ring.slot;
                ring.next(n.regions);
            }
        }
        cp_async_wait<0>();
        if (before >= 0) hand_over(before);
    }
};

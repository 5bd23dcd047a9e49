/* Products of matrices in shared memory by a warpgroup, four consecutive warps: the tensor cores of sm_90a read both
 * factors from there themselves, asynchronously.
 *
 * A factor is stored in shared memory as cores of 8 rows x 8 values, half: 128 bytes, row after row. A row of a core
 * may start at any multiple of 16 bytes, so a core is any 8 consecutive pieces of 8 values.
 *
 * Source  PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions": no swizzling, or that of
 *         32 or 64 bytes, both factors K-major.
 * Tested  tests/kernels/gpu/implicit_gemm/test_primitive.py, test_warpgroup.py
 */
#pragma once

#include "device_ops.cuh"

constexpr int WARPGROUP = 128;

/* The descriptor of a factor of 16 values along k: `first` its first row, `along_k` and `along_rows` from core to core,
 * in pieces of 16 bytes, less than 2^14. A factor that starts i pieces later: + i.
 */
DEVICE unsigned long long wgmma_factor(const void* first, int along_k, int along_rows);

/* The descriptor of a factor whose rows of 32 or 64 bytes follow each other, in shared memory at a multiple of 512 bytes;
 * a piece that belongs at byte `at` lies at `swizzled(at, ..)`. A factor that starts a row, or k = 16, later: + the pieces
 * to there.
 */
DEVICE unsigned long long wgmma_swizzled(const void* first, int row_bytes, int along_rows);
DEVICE int swizzled(int at, int row_bytes) { return at ^ (at >> 3 & (row_bytes - 16) & 0x30); }

/* Computes d = a b, or d += a b if `adds`: a 64 x 16, b 16 x N, d 64 x N float in the warpgroup's registers: thread 32
 * w + 4 g + t has
 *   d[4 j], d[4 j + 1] = D[16 w + g][8 j + 2 t, + 1];  d[4 j + 2], d[4 j + 3] = D[16 w + g + 8][8 j + 2 t, + 1]
 * All threads of the warpgroup call. No thread may touch d, or write to the memory of a and b, before `wgmma_wait`.
 */
template <int N> DEVICE void wgmma_half(float (&d)[N / 2], unsigned long long a, unsigned long long b, bool adds);

/* Call wgmma_begin before the first product of a group, with all sums they add to (else the compiler waits for every
 * product); wgmma_end after the last; wgmma_wait to wait for all, with d.
 */
template <int ROWS, int COUNT> DEVICE void wgmma_begin(float (&d)[ROWS][COUNT]);
DEVICE void wgmma_end();
DEVICE void wgmma_wait();
template <int COUNT> DEVICE void wgmma_wait(float (&d)[COUNT]);
/* Waits for all groups but the last one that ended: the memory of their factors may be written to. */
DEVICE void wgmma_wait_but_last();

/* Makes this thread's writes to shared memory visible to products and bulk copies that start after the next barrier. */
DEVICE void wgmma_publish();

/* Asynchronous copies from shared to global memory: all addresses and bytes are multiples of 16. A thread's copies up
 * to a commit have read shared memory after `bulk_wait`, and are complete after `bulk_finish`.
 */
DEVICE void bulk_store(void* global, const void* shared, int bytes);
DEVICE void bulk_commit();
DEVICE void bulk_wait();
DEVICE void bulk_finish();

/* Asynchronous copies from global to shared memory by one thread: they are complete when `arrival_wait` returns. An
 * arrival is in shared memory; one thread initialises it, before a barrier; it is waited for as often as it is used,
 * with `parity` 0 the first time, then 1, 0, ..
 */
using Arrival = unsigned long long;
DEVICE void arrival_begin(Arrival* arrival);
DEVICE void bulk_load(void* shared, const void* global, int bytes, Arrival* arrival);
DEVICE void arrival_wait(Arrival* arrival, int parity);

#ifndef ZNNPY_EMULATOR

DEVICE unsigned long long wgmma_factor(const void* first, int along_k, int along_rows) {
    return (unsigned long long)(shared_address(first) >> 4) | (unsigned long long)along_k << 16 |
           (unsigned long long)along_rows << 32;
}

DEVICE unsigned long long wgmma_swizzled(const void* first, int row_bytes, int along_rows) {
    return wgmma_factor(first, 1, along_rows) | (row_bytes == 64 ? 2ull : 3ull) << 62;
}

// %0, %1, ... for N / 2 sums, and their operands
#define WGMMA_TEXT_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_TEXT_32 WGMMA_TEXT_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_TEXT_48 WGMMA_TEXT_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_TEXT_64 WGMMA_TEXT_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_TEXT_80 WGMMA_TEXT_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_TEXT_96 WGMMA_TEXT_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_TEXT_112 WGMMA_TEXT_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_TEXT_128 WGMMA_TEXT_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_EIGHT(i)                                                                                           \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define WGMMA_SUMS_16 WGMMA_EIGHT(0)
#define WGMMA_SUMS_32 WGMMA_SUMS_16, WGMMA_EIGHT(8)
#define WGMMA_SUMS_48 WGMMA_SUMS_32, WGMMA_EIGHT(16)
#define WGMMA_SUMS_64 WGMMA_SUMS_48, WGMMA_EIGHT(24)
#define WGMMA_SUMS_80 WGMMA_SUMS_64, WGMMA_EIGHT(32)
#define WGMMA_SUMS_96 WGMMA_SUMS_80, WGMMA_EIGHT(40)
#define WGMMA_SUMS_112 WGMMA_SUMS_96, WGMMA_EIGHT(48)
#define WGMMA_SUMS_128 WGMMA_SUMS_112, WGMMA_EIGHT(56)
#define WGMMA(N, A, B, ADDS)                                                                                          \
    template <> DEVICE void wgmma_half<N>(float (&d)[N / 2], unsigned long long a, unsigned long long b, bool adds) { \
        asm volatile("{ .reg .pred adds; setp.ne.b32 adds, " ADDS ", 0; "                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" WGMMA_TEXT_##N "}, " A ", " B         \
                     ", adds, 1, 1, 0, 0; }"                                                                         \
                     : WGMMA_SUMS_##N                                                                                \
                     : "l"(a), "l"(b), "r"((int)adds)                                                                \
                     : "memory");                                                                                    \
    }
WGMMA(16, "%8", "%9", "%10")
WGMMA(32, "%16", "%17", "%18")
WGMMA(48, "%24", "%25", "%26")
WGMMA(64, "%32", "%33", "%34")
WGMMA(80, "%40", "%41", "%42")
WGMMA(96, "%48", "%49", "%50")
WGMMA(112, "%56", "%57", "%58")
WGMMA(128, "%64", "%65", "%66")
#undef WGMMA_TEXT_16
#undef WGMMA_SUMS_16
#undef WGMMA_TEXT_32
#undef WGMMA_SUMS_32
#undef WGMMA_TEXT_48
#undef WGMMA_SUMS_48
#undef WGMMA_TEXT_64
#undef WGMMA_SUMS_64
#undef WGMMA_TEXT_80
#undef WGMMA_SUMS_80
#undef WGMMA_TEXT_96
#undef WGMMA_SUMS_96
#undef WGMMA_TEXT_112
#undef WGMMA_SUMS_112
#undef WGMMA_TEXT_128
#undef WGMMA_SUMS_128
#undef WGMMA_EIGHT
#undef WGMMA

template <int ROWS, int COUNT> DEVICE void wgmma_begin(float (&d)[ROWS][COUNT]) {
#pragma unroll
    for (int i = 0; i < ROWS * COUNT; ++i) asm volatile("" : "+f"(d[i / COUNT][i % COUNT])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
DEVICE void wgmma_wait_but_last() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }
template <int COUNT> DEVICE void wgmma_wait(float (&d)[COUNT]) {
    wgmma_wait();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");  // the sums are not read before
}
DEVICE void wgmma_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void arrival_begin(Arrival* arrival) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster; fence.proxy.async;" ::"r"(
                     shared_address(arrival))
                 : "memory");
}
DEVICE void bulk_load(void* shared, const void* global, int bytes, Arrival* arrival) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2; "
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(arrival))
                 : "memory");
}
DEVICE void arrival_wait(Arrival* arrival, int parity) {
    asm volatile("{ .reg .pred done; wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
                 "@!done bra wait; }" ::"r"(shared_address(arrival)),
                 "r"(parity)
                 : "memory");
}

DEVICE void bulk_store(void* global, const void* shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void bulk_finish() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

#else  // the emulator: a product is computed when it is waited for

namespace twin {
struct WarpgroupProduct {  // a thread's part of a product
    float* d;
    unsigned long long a, b;
    int n;
    bool adds;
};
constexpr int MOST_PRODUCTS = 256;
struct WarpgroupProducts {
    int count, earlier;  // earlier: those before the last group that ended
    int ended;           // those of groups that ended
    WarpgroupProduct all[MOST_PRODUCTS];
};
inline WarpgroupProducts max_in_flight[1024];  // products by thread of the block

/* Row `row` of 8 values, `k` of two. */
inline const half* row_of(unsigned long long factor, int k, int row) {
    const size_t mask = (1 << 14) - 1, along_k = factor >> 16 & mask, along_rows = factor >> 32 & mask;
    const auto* const begin = static_cast<const unsigned char*>(emulator::dynamic_shared());
    if (const int row_bytes = factor >> 62 == 0 ? 0 : factor >> 62 == 2 ? 64 : 32) {
        const size_t piece = (factor & mask) + row / 8 * along_rows + row % 8 * row_bytes / 16 + k;
        return reinterpret_cast<const half*>(begin + swizzled((int)piece * 16, row_bytes));
    }
    const size_t piece = (factor & mask) + k * along_k + row / 8 * along_rows + row % 8;
    return reinterpret_cast<const half*>(begin + 16 * piece);
}
inline void compute(const WarpgroupProduct& product) {
    const int thread = emulator::now->number % WARPGROUP, g = thread % WARP / 4, t = thread % 4;
    for (int i = 0; i < product.n / 2; ++i) {
        const int row = thread / WARP * 16 + g + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 2; ++k) {
            const half *left = row_of(product.a, k, row), *right = row_of(product.b, k, column);
            for (int v = 0; v < 8; ++v) sum += to_float(left[v]) * to_float(right[v]);
        }
        product.d[i] = product.adds ? product.d[i] + sum : sum;  // rounded once, as in the emulation of mma_half
    }
}
}  // namespace twin

DEVICE unsigned long long wgmma_factor(const void* first, int along_k, int along_rows) {
    const auto* const begin = static_cast<const unsigned char*>(emulator::dynamic_shared());
    const size_t at = static_cast<const unsigned char*>(first) - begin;
    if (at % 16 != 0) emulator::fail("wgmma: a factor is not aligned to 16 bytes");
    if (along_k >= 1 << 14 || along_rows >= 1 << 14) emulator::fail("wgmma: cores too far apart");
    return at / 16 | (unsigned long long)along_k << 16 | (unsigned long long)along_rows << 32;
}
DEVICE unsigned long long wgmma_swizzled(const void* first, int row_bytes, int along_rows) {
    return wgmma_factor(first, 1, along_rows) | (row_bytes == 64 ? 2ull : 3ull) << 62;
}
template <int N> DEVICE void wgmma_half(float (&d)[N / 2], unsigned long long a, unsigned long long b, bool adds) {
    twin::WarpgroupProducts& mine = twin::max_in_flight[emulator::now->number];
    if (mine.count == twin::MOST_PRODUCTS) emulator::fail("wgmma: too many products under way for the emulator");
    mine.all[mine.count++] = {d, a, b, N, adds};
}
template <int ROWS, int COUNT> DEVICE void wgmma_begin(float (&)[ROWS][COUNT]) {}
DEVICE void wgmma_end() {
    twin::WarpgroupProducts& mine = twin::max_in_flight[emulator::now->number];
    mine.earlier = mine.ended, mine.ended = mine.count;
}
DEVICE void wgmma_wait() {
    twin::WarpgroupProducts& mine = twin::max_in_flight[emulator::now->number];
    for (int i = 0; i < mine.count; ++i) twin::compute(mine.all[i]);
    mine.count = mine.earlier = mine.ended = 0;
}
DEVICE void wgmma_wait_but_last() {
    twin::WarpgroupProducts& mine = twin::max_in_flight[emulator::now->number];
    for (int i = 0; i < mine.earlier; ++i) twin::compute(mine.all[i]);
    for (int i = mine.earlier; i < mine.count; ++i) mine.all[i - mine.earlier] = mine.all[i];
    mine.count -= mine.earlier, mine.ended -= mine.earlier, mine.earlier = 0;
}
template <int COUNT> DEVICE void wgmma_wait(float (&)[COUNT]) { wgmma_wait(); }
DEVICE void wgmma_publish() {}

namespace twin {  // a bulk copy is made when it is waited for
struct Bulk {
    void* to;
    const void* from;
    int bytes;
};
struct BulkStores {
    int count, committed;
    Bulk all[4];
};
inline BulkStores pending_stores[1024];  // stores by thread of the block
inline Bulk bulk_of(void* to, const void* from, int bytes) {
    const size_t all = reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from) | (size_t)bytes;
    if (all % 16 != 0) emulator::fail("bulk copies: addresses and bytes are multiples of 16");
    return {to, from, bytes};
}
inline void make(const Bulk& bulk) { std::memcpy(bulk.to, bulk.from, (size_t)bulk.bytes); }

struct BulkLoad {
    Arrival* arrival;  // null: none
    Bulk bulk;
};
inline BulkLoad pending_loads[4];  // loads of the block
}  // namespace twin

// An arrival counts its phases, which detects a wait for the wrong one, or without a barrier after the load, since no
// other thread runs while one waits. Until then the destination holds NaN: no thread may still read the old data, nor
// already the new.
DEVICE void arrival_begin(Arrival* arrival) {
    *arrival = 0;
    for (twin::BulkLoad& load : twin::pending_loads) load.arrival = nullptr;
}
DEVICE void bulk_load(void* shared, const void* global, int bytes, Arrival* arrival) {
    const twin::Bulk bulk = twin::bulk_of(shared, global, bytes);
    ++*arrival;
    std::memset(shared, 0xFF, (size_t)bytes);
    for (twin::BulkLoad& load : twin::pending_loads) {
        if (load.arrival != nullptr) continue;
        load = {arrival, bulk};
        return;
    }
    emulator::fail("bulk_load: too many copies under way for the emulator");
}
DEVICE void arrival_wait(Arrival* arrival, int parity) {
    if (*arrival % 2 == (Arrival)parity) emulator::fail("arrival_wait: nothing is on its way");
    for (twin::BulkLoad& load : twin::pending_loads) {
        if (load.arrival != arrival) continue;
        twin::make(load.bulk);
        load.arrival = nullptr;
    }
}

DEVICE void bulk_store(void* global, const void* shared, int bytes) {
    twin::BulkStores& mine = twin::pending_stores[emulator::now->number];
    if (mine.count == 4) emulator::fail("bulk_store: too many copies under way for the emulator");
    mine.all[mine.count++] = twin::bulk_of(global, shared, bytes);
}
DEVICE void bulk_commit() {
    twin::BulkStores& mine = twin::pending_stores[emulator::now->number];
    mine.committed = mine.count;
}
DEVICE void bulk_wait() {
    twin::BulkStores& mine = twin::pending_stores[emulator::now->number];
    for (int i = 0; i < mine.committed; ++i) twin::make(mine.all[i]);
    for (int i = mine.committed; i < mine.count; ++i) mine.all[i - mine.committed] = mine.all[i];
    mine.count -= mine.committed, mine.committed = 0;
}
DEVICE void bulk_finish() { bulk_wait(); }

#endif

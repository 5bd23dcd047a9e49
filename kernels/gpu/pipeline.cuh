/* Barriers of sm_90 through which some threads of a block hand buffers in shared memory to others and back.
 *
 * A barrier has phases, 0, 1, 2, ..; a phase ends when as many threads as `barrier_begin` says have arrived, and what a
 * thread hands over with `barrier_load` is there. Threads that write to a buffer themselves call `wgmma_publish` before
 * they arrive, if products read it.
 *
 * Source  PTX ISA 9.0, "mbarrier", "cp.async.bulk", "stmatrix"
 * Tested  tests/kernels/gpu/graph_gemm/test_primitive.py
 */
#pragma once

#include "wgmma.cuh"

/* A barrier in shared memory. One thread calls barrier_begin for each, then barriers_begun, before all threads meet at a
 * barrier of the block.
 */
using Barrier = unsigned long long;
DEVICE void barrier_begin(Barrier* barrier, int arrivals);
DEVICE void barriers_begun();
DEVICE void barrier_arrive(Barrier* barrier);
/* Wait for the end of a phase with this parity, 0 or 1; that of the phase before phase 0 is 1, and it has ended. */
DEVICE void barrier_wait(Barrier* barrier, int parity);
/* Whether that phase has ended. */
DEVICE bool barrier_passed(Barrier* barrier, int parity);
/* Arrive, and let the phase wait for a copy from global memory too: addresses and bytes are multiples of 16. */
DEVICE void barrier_load(void* shared, const void* global, int bytes, Barrier* barrier);

/* Gives registers back, or takes some that others gave back: a thread has so many then. All threads of a warpgroup call,
 * in a branch that they take together.
 */
template <int COUNT> DEVICE void registers_lower();
template <int COUNT> DEVICE void registers_raise();

/* Stores four 8 x 8 matrices of 16-bit elements in shared memory, transposed: word i of lane 4 g + t holds elements 2t,
 * 2t+1 of row g of matrix i, and lane 8 i + r passes the address (16 bytes, aligned to 16) that gets its column r. All
 * lanes must call.
 */
DEVICE void stmatrix_transposed(void* column, const unsigned (&words)[4]);

#ifndef ZNNPY_EMULATOR

DEVICE void barrier_begin(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
DEVICE void barriers_begun() {  // once, since a fence takes hundreds of cycles
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
}
DEVICE void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
DEVICE void barrier_wait(Barrier* barrier, int parity) { arrival_wait(barrier, parity); }
DEVICE bool barrier_passed(Barrier* barrier, int parity) {
    int passed;
    asm volatile("{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.b32 %0, 1, 0, done; }"
                 : "=r"(passed)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return passed != 0;
}
DEVICE void barrier_load(void* shared, const void* global, int bytes, Barrier* barrier) {
    bulk_load(shared, global, bytes, barrier);
}

template <int COUNT> DEVICE void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> DEVICE void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

DEVICE void stmatrix_transposed(void* column, const unsigned (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(column)),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

#else  // the emulator: a copy is made when a thread waits for it, and there is NaN until then

namespace twin {
struct Phases {  // of a barrier, in its 8 bytes
    unsigned short missing, arrivals;
    unsigned ended;
};
static_assert(sizeof(Phases) == sizeof(Barrier));
inline Phases& phases_of(Barrier* barrier) { return *reinterpret_cast<Phases*>(barrier); }
struct HandedOver {
    Barrier* barrier;  // null: none
    Bulk bulk;
};
inline HandedOver handed_over[16];  // copies of the block under way
}  // namespace twin

DEVICE void barrier_begin(Barrier* barrier, int arrivals) {
    twin::phases_of(barrier) = {(unsigned short)arrivals, (unsigned short)arrivals, 0};
    for (twin::HandedOver& load : twin::handed_over) load.barrier = nullptr;
}
DEVICE void barriers_begun() {}
DEVICE void barrier_arrive(Barrier* barrier) {
    twin::Phases& phases = twin::phases_of(barrier);
    if (phases.missing == 0) emulator::fail("barrier_arrive: more arrivals than the barrier has");
    if (--phases.missing > 0) return;
    phases.missing = phases.arrivals, ++phases.ended;
    emulator::wake();
}
DEVICE bool barrier_passed(Barrier* barrier, int parity) {
    if ((twin::phases_of(barrier).ended & 1) == (unsigned)parity) return false;
    for (twin::HandedOver& load : twin::handed_over) {
        if (load.barrier != barrier) continue;
        twin::make(load.bulk);
        load.barrier = nullptr;
    }
    return true;
}
DEVICE void barrier_wait(Barrier* barrier, int parity) {
    while (!barrier_passed(barrier, parity)) emulator::wait_for_signal();
}
DEVICE void barrier_load(void* shared, const void* global, int bytes, Barrier* barrier) {
    const twin::Bulk bulk = twin::bulk_of(shared, global, bytes);
    std::memset(shared, 0xFF, (size_t)bytes);
    for (twin::HandedOver& load : twin::handed_over) {
        if (load.barrier != nullptr) continue;
        load = {barrier, bulk};
        return barrier_arrive(barrier);
    }
    emulator::fail("barrier_load: too many copies under way for the emulator");
}

template <int COUNT> DEVICE void registers_lower() {}
template <int COUNT> DEVICE void registers_raise() {}

DEVICE void stmatrix_transposed(void* column, const unsigned (&words)[4]) {
    struct Given {
        void* column;
        unsigned words[4];
    };
    const Given* lanes = emulator::of_all_lanes(Given{column, {words[0], words[1], words[2], words[3]}});
    const int matrix = emulator::lane() / 8, r = emulator::lane() % 8;
    if (reinterpret_cast<unsigned long long>(column) % 16 != 0) emulator::fail("stmatrix: misaligned column");
    for (int row = 0; row < 8; ++row)
        static_cast<unsigned short*>(column)[row] =
            (unsigned short)(lanes[4 * row + r / 2].words[matrix] >> 16 * (r % 2));
}

#endif

/* CUDA on a CPU: kernels compiled as plain C++, one fiber per CUDA thread, block after block.
 *
 * A block's threads are resumed warp by warp and run until a barrier, a shuffle or their end; the order is reversed
 * every time, so that a result which needs a missing barrier tends to change.
 * Dynamic and fixed shared memory is full of NaN when a block starts, cp.async copies arrive only when they are waited
 * for, and a barrier that not all threads reach, an access beyond an array or a stack that is too small end the launch
 * with a sentence. It proves indexing and arithmetic; it finds no bank conflicts and not every race.
 *
 * Float is IEEE single, and denormals are zeros, as CuPy has kernels compiled; expf, tanhf and their like are the C
 * library's.
 * One launch at a time: everything here is global.
 */
#pragma once

#define ZNNPY_EMULATOR 1

#include "cuda_language.hpp"
#include "fibers.hpp"
#include "launch.hpp"

inline void __syncthreads() { emulator::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    emulator::whole(mask, "__syncwarp of some lanes is not emulated");
    emulator::warp_barrier();
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T> inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    emulator::whole(mask, "a shuffle of some lanes is not emulated");
    const int lane = emulator::lane();
    return emulator::of_all_lanes(value)[lane / width * width + from % width];
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32) {
    emulator::whole(mask, "a shuffle of some lanes is not emulated");
    const int lane = emulator::lane(), from = lane ^ with;
    const T* all = emulator::of_all_lanes(value);
    return all[from / width <= lane / width ? from : lane];
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, int by, int width = 32) {
    emulator::whole(mask, "a shuffle of some lanes is not emulated");
    const int lane = emulator::lane(), from = lane + by;
    const T* all = emulator::of_all_lanes(value);
    return all[from / width == lane / width ? from : lane];
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, int by, int width = 32) {
    emulator::whole(mask, "a shuffle of some lanes is not emulated");
    const int lane = emulator::lane(), from = lane % width - by;
    const T* all = emulator::of_all_lanes(value);
    return all[from >= 0 ? lane - by : lane];
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    emulator::whole(mask, "a ballot of some lanes is not emulated");
    const int* all = emulator::of_all_lanes(predicate);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= (all[lane] != 0 ? 1u : 0u) << lane;
    return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == 0xffffffffu; }
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    emulator::whole(mask, "a reduction of some lanes is not emulated");
    const unsigned* all = emulator::of_all_lanes(value);
    unsigned largest = 0;
    for (int lane = 0; lane < 32; ++lane) largest = max(largest, all[lane]);
    return largest;
}

// One thread runs at a time: every operation is atomic.
template <class T> inline T atomicMax(T* at, T value) {
    const T old = *at;
    if (value > old) *at = value;
    return old;
}
template <class T> inline T atomicAdd(T* at, T value) {
    const T old = *at;
    *at = old + value;
    return old;
}

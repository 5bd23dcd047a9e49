/* CUDA threads as fibers: switching stacks, barriers, exchanges between lanes, shared memory, pending copies. */
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "cuda_language.hpp"

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.local znnpy_switch
.type znnpy_switch, @function
znnpy_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
.size znnpy_switch, .-znnpy_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.local znnpy_switch
.type znnpy_switch, %function
znnpy_switch:
    stp x29, x30, [sp, #-160]!
    stp x19, x20, [sp, #16]
    stp x21, x22, [sp, #32]
    stp x23, x24, [sp, #48]
    stp x25, x26, [sp, #64]
    stp x27, x28, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #16]
    ldp x21, x22, [sp, #32]
    ldp x23, x24, [sp, #48]
    ldp x25, x26, [sp, #64]
    ldp x27, x28, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x29, x30, [sp], #160
    ret
.size znnpy_switch, .-znnpy_switch
)");
#else
#error "the emulator switches stacks on x86-64 and aarch64 only"
#endif

/* Save the registers that the caller must keep on its stack, and the stack in *from; continue where the stack `to` stopped. */
extern "C" void znnpy_switch(void** from, void* to);

namespace emulator {
dim3 gridDim, blockDim;
uint3 blockIdx, threadIdx;
}  // namespace emulator
using emulator::blockDim;
using emulator::blockIdx;
using emulator::gridDim;
using emulator::threadIdx;

namespace emulator {

constexpr int MOST_THREADS = 1024, LANES = 32;
constexpr size_t STACK_BYTES = 128 << 10, PAGE_BYTES = 64 << 10, FIXED_SHARED_BYTES = 48 << 10,
                 DYNAMIC_SHARED_BYTES = 256 << 10;
constexpr int MOST_FIXED_SHARED = 64, MOST_COPIES = 1024, WIDEST_LANE = 64, RESULT_BYTES = 512;

enum class Waits : unsigned char { NO, BLOCK, WARP, SIGNAL, ENDED };

struct Copy {
    void* to;
    const void* from;
    int nbytes;
    bool valid;
};

struct Thread {
    void* stack_pointer;
    uint3 index;
    Waits waits;
    int number;  // in the block
    int exchanges;
};

struct Copies {        // of one thread, not made yet
    int count, groups;  // groups: committed
    int group_end[MOST_COPIES / 4];
    Copy copy[MOST_COPIES];
};

struct Warp {
    int arrived, alive;
    int result_of;  // which exchange
    alignas(64) unsigned char result[2][RESULT_BYTES];
    alignas(64) unsigned char lanes[2][LANES * WIDEST_LANE];  // two, so that one barrier an exchange is enough
};

/* Memory for a block's threads. Every compiled source has its own globals, but all sources share this memory. */
struct BlockMemory {
    Thread* threads;  // MOST_THREADS of each
    Copies* copies;
    unsigned char *stacks, *fixed_shared, *dynamic_shared;
};

inline BlockMemory* block_memory;
inline Thread* threads;  // those of block_memory
inline Thread* now;
inline Warp warps[MOST_THREADS / LANES];
inline int thread_count, block_arrived, block_alive;
inline void* scheduler;  // its stack
inline int direction;    // 1 or -1, from lane to lane
inline void (*entry)(void*);
inline void* entry_state;
inline unsigned char* dynamic_memory;  // of this launch: ends where that memory ends
inline size_t dynamic_bytes;
inline size_t fixed_used;
inline ptrdiff_t fixed_at[MOST_FIXED_SHARED];
inline bool failed;
inline char sentence[512];

inline void describe(const char* format, ...) {
    if (failed) return;  // the first fault is the cause
    failed = true;
    int used = std::snprintf(sentence, sizeof sentence, "block (%u, %u, %u) thread (%u, %u, %u): ", blockIdx.x,
                             blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    va_list values;
    va_start(values, format);
    std::vsnprintf(sentence + used, sizeof sentence - used, format, values);
    va_end(values);
}

/* Continue with `thread`. */
inline void resume(void** from, Thread& thread) {
    now = &thread;
    threadIdx = thread.index;
    znnpy_switch(from, thread.stack_pointer);
}

inline void leave() { znnpy_switch(&now->stack_pointer, scheduler); }

/* Continue with the next lane of the warp, in order, that does not wait; if there is none, with the scheduler. */
inline void give_way() {
    Thread* const self = now;
    const int lane = self->number % LANES, first = self->number - lane;
    const int lanes = thread_count - first < LANES ? thread_count - first : LANES;
    for (int next = lane + direction; next != lane; next += direction) {
        if (next < 0 || next >= lanes) {
            next = direction > 0 ? -1 : lanes;  // the other end comes next
            continue;
        }
        if (threads[first + next].waits == Waits::NO) return resume(&self->stack_pointer, threads[first + next]);
    }
    leave();
}

/* End the launch with `why`. */
[[noreturn]] inline void fail(const char* why) {
    describe("%s", why);
    leave();
    std::abort();
}

inline int lane() { return now->number % LANES; }
inline Warp& warp() { return warps[now->number / LANES]; }

inline void free_block() {
    for (int i = 0; i < thread_count; ++i)
        if (threads[i].waits == Waits::BLOCK) threads[i].waits = Waits::NO;
    block_arrived = 0;
}
inline void free_warp(int first) {
    for (int i = first; i < first + LANES && i < thread_count; ++i)
        if (threads[i].waits == Waits::WARP) threads[i].waits = Waits::NO;
    warps[first / LANES].arrived = 0;
}

inline void block_barrier() {
    if (++block_arrived == block_alive) return free_block();
    now->waits = Waits::BLOCK;
    leave();
}
inline void warp_barrier() {
    if (++warp().arrived == warp().alive) return free_warp(now->number - lane());
    now->waits = Waits::WARP;
    give_way();
}

/* Wait until another thread calls `wake`, which wakes all that wait: each looks again whether it may go on. */
inline void wait_for_signal() {
    now->waits = Waits::SIGNAL;
    leave();
}
inline void wake() {
    for (int i = 0; i < thread_count; ++i)
        if (threads[i].waits == Waits::SIGNAL) threads[i].waits = Waits::NO;
}

/* The values that the 32 lanes gave: all lanes call this, and read the values before their next exchange. */
template <class T> const T* of_all_lanes(T value) {
    static_assert(sizeof(T) <= WIDEST_LANE && std::is_trivially_copyable_v<T>);
    unsigned char* const row = warp().lanes[now->exchanges++ % 2];
    std::memcpy(row + lane() * sizeof(T), &value, sizeof(T));
    warp_barrier();
    return reinterpret_cast<const T*>(row);
}
/* The result of `compute(T&)` for the last exchange, computed once for all lanes. */
template <class T, class F> const T& once_a_warp(F compute) {
    static_assert(sizeof(T) <= RESULT_BYTES);
    T& result = *reinterpret_cast<T*>(warp().result[now->exchanges % 2]);
    if (warp().result_of != now->exchanges) compute(result);
    warp().result_of = now->exchanges;
    return result;
}
inline void whole(unsigned mask, const char* what) {
    if (mask != 0xffffffffu) fail(what);
}

inline void* dynamic_shared() { return dynamic_memory; }

/* One object that all threads of a block share. */
template <class T> T& fixed_shared(int key) {
    if (key >= MOST_FIXED_SHARED) fail("too many SHARED arrays for the emulator");
    if (fixed_at[key] < 0) {
        fixed_at[key] = (ptrdiff_t)fixed_used;
        fixed_used = (fixed_used + sizeof(T) + 127) / 128 * 128;
        if (fixed_used > FIXED_SHARED_BYTES) fail("more than 48 KiB of fixed shared memory");
    }
    return *reinterpret_cast<T*>(block_memory->fixed_shared + fixed_at[key]);
}

inline void copy_later(void* to, const void* from, int nbytes, bool valid) {
    if ((size_t)to % nbytes != 0 || (valid && (size_t)from % nbytes != 0))
        fail("cp.async: an address is not a multiple of the bytes to copy");
    Copies& copies = block_memory->copies[now->number];
    if (copies.count == MOST_COPIES) fail("cp.async: too many copies under way for the emulator");
    copies.copy[copies.count++] = {to, from, nbytes, valid};
}
inline void commit_copies() {
    Copies& copies = block_memory->copies[now->number];
    if (copies.groups == MOST_COPIES / 4) fail("cp.async: too many groups under way for the emulator");
    copies.group_end[copies.groups++] = copies.count;
}
/* Make the copies of all but the last `groups_left` committed groups. */
inline void wait_for_copies(int groups_left) {
    Copies& copies = block_memory->copies[now->number];
    const int done = copies.groups - groups_left;
    if (done <= 0) return;
    const int end = copies.group_end[done - 1];
    for (int i = 0; i < end; ++i) {
        const Copy& copy = copies.copy[i];
        if (copy.valid)
            std::memcpy(copy.to, copy.from, copy.nbytes);
        else
            std::memset(copy.to, 0, copy.nbytes);
    }
    std::memmove(copies.copy, copies.copy + end, (copies.count - end) * sizeof(Copy));
    copies.count -= end;
    for (int group = done; group < copies.groups; ++group) copies.group_end[group - done] = copies.group_end[group] - end;
    copies.groups -= done;
}

}  // namespace emulator

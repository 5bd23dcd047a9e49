/* CUDA's words on a CPU: kernels compiled as plain C++, one fiber per CUDA thread, block after block.
 *
 * A block's threads are resumed warp by warp and run until a barrier, a shuffle or their end; the order is turned round
 * at every turn, so that a result which needs a barrier that is not there tends to change.
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

#include <csignal>
#include <cstdarg>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __constant__ static
#define __shared__ static  // not poisoned: kernels use SHARED and EXTERN_SHARED
#define __restrict__ __restrict
#define __grid_constant__

// ---- vectors ----

template <class T, int BYTES> struct alignas(BYTES) Two { T x, y; };
template <class T, int BYTES> struct alignas(BYTES) Three { T x, y, z; };
template <class T, int BYTES> struct alignas(BYTES) Four { T x, y, z, w; };
#define ZNNPY_VECTORS(name, type)                                                                               \
    using name##2 = Two<type, 2 * sizeof(type)>;                                                                \
    using name##3 = Three<type, sizeof(type)>;                                                                  \
    using name##4 = Four<type, (4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type))>;                                \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                            \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                 \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
ZNNPY_VECTORS(float, float)
ZNNPY_VECTORS(int, int)
ZNNPY_VECTORS(uint, unsigned)
ZNNPY_VECTORS(short, short)
ZNNPY_VECTORS(ushort, unsigned short)
ZNNPY_VECTORS(char, signed char)
ZNNPY_VECTORS(uchar, unsigned char)
ZNNPY_VECTORS(double, double)
ZNNPY_VECTORS(longlong, long long)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- half precision: storage of 16 bits, arithmetic by way of float ----

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline int __float_as_int(float value) { return (int)__float_as_uint(value); }
inline float __int_as_float(int bits) { return __uint_as_float((unsigned)bits); }

struct __attribute__((aligned(2))) half {
    std::uint16_t bits;

    half() = default;
    half(float value) : bits(of(value)) {}
    operator float() const {
#ifdef __F16C__
        typedef short Halves __attribute__((vector_size(16)));
        return __builtin_ia32_vcvtph2ps(Halves{(short)bits})[0];
#endif
        const unsigned magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
        const unsigned exponent = magnitude & 0x0f800000u;
        if (exponent == 0x0f800000u) return __uint_as_float(sign | (magnitude + 0x70000000u));  // infinity, NaN
        if (exponent == 0)  // subnormal: 2^-24 a unit
            return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude + 0x38800000u) - 0x1p-14f));
        return __uint_as_float(sign | (magnitude + 0x38000000u));
    }

    static std::uint16_t of(float value) {  // to nearest, ties to even
#ifdef __F16C__
        typedef float Floats __attribute__((vector_size(16)));
        return (std::uint16_t)__builtin_ia32_vcvtps2ph(Floats{value}, 0)[0];
#endif
        unsigned magnitude = __float_as_uint(value);
        const unsigned sign = magnitude >> 16 & 0x8000u;
        magnitude &= 0x7fffffffu;
        if (magnitude > 0x7f800000u) return sign | 0x7fffu;       // NaN
        if (magnitude >= 0x477ff000u) return sign | 0x7c00u;      // 65520 and more
        if (magnitude < 0x38800000u)                              // adding 1/2 rounds to units of 2^-24
            return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);
        return sign | (magnitude + 0xc8000fffu + (magnitude >> 13 & 1u)) >> 13;
    }
};
using __half = half;
struct __attribute__((aligned(4))) half2 {
    half x, y;
};
using __half2 = half2;

inline half __float2half_rn(float value) { return half(value); }
inline half __float2half(float value) { return half(value); }
inline float __half2float(half value) { return value; }
inline half2 __floats2half2_rn(float x, float y) { return {half(x), half(y)}; }
inline half2 __float22half2_rn(float2 pair) { return {half(pair.x), half(pair.y)}; }
inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline half2 __half2half2(half both) { return {both, both}; }
inline float2 __half22float2(half2 pair) { return {pair.x, pair.y}; }
inline float __low2float(half2 pair) { return pair.x; }
inline float __high2float(half2 pair) { return pair.y; }
inline unsigned short __half_as_ushort(half value) { return value.bits; }
inline half __ushort_as_half(unsigned short bits) {
    half value;
    value.bits = bits;
    return value;
}
inline half2 __hadd2(half2 a, half2 b) { return {half(float(a.x) + float(b.x)), half(float(a.y) + float(b.y))}; }
inline half2 __hsub2(half2 a, half2 b) { return {half(float(a.x) - float(b.x)), half(float(a.y) - float(b.y))}; }
inline half2 __hmul2(half2 a, half2 b) { return {half(float(a.x) * float(b.x)), half(float(a.y) * float(b.y))}; }
inline half2 __hfma2(half2 a, half2 b, half2 c) {
    return {half(float(a.x) * float(b.x) + float(c.x)), half(float(a.y) * float(b.y) + float(c.y))};
}
inline half2 __hneg2(half2 a) { return {half(-a.x), half(-a.y)}; }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned chosen = 0;
    for (int i = 0; i < 4; ++i) chosen |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return chosen;
}
inline half2 __hmax2(half2 a, half2 b) { return {half(fmaxf(a.x, b.x)), half(fmaxf(a.y, b.y))}; }
inline half2 __hmax2_nan(half2 a, half2 b) {
    const auto larger = [](float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; };
    return {half(larger(a.x, b.x)), half(larger(a.y, b.y))};
}

// ---- arithmetic ----

template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
    if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>)
        return std::fmin(a, b);
    else
        return (std::common_type_t<A, B>)b < (std::common_type_t<A, B>)a ? b : a;
}
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {
    if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>)
        return std::fmax(a, b);
    else
        return (std::common_type_t<A, B>)a < (std::common_type_t<A, B>)b ? b : a;
}
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __expf(float a) { return expf(a); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }
inline int __float2int_rn(float a) { return (int)nearbyintf(a); }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __clz(int a) { return a == 0 ? 32 : __builtin_clz((unsigned)a); }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline unsigned __brev(unsigned a) {
    unsigned turned = 0;
    for (int bit = 0; bit < 32; ++bit) turned |= (a >> bit & 1u) << (31 - bit);
    return turned;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
template <class T> inline T __ldg(const T* from) { return *from; }
template <class T> inline T __ldcs(const T* from) { return *from; }
template <class T> inline T __ldcg(const T* from) { return *from; }
template <class T> inline void __stcs(T* to, T value) { *to = value; }
template <class T> inline void __stcg(T* to, T value) { *to = value; }
inline size_t __cvta_generic_to_shared(const void* shared) { return (size_t)shared; }

// ---- fibers ----

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

/* Save what the caller must keep on its stack, and the stack in *from; go on where the stack `to` left off. */
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

enum class Waits : unsigned char { NO, BLOCK, WARP, ENDED };

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

/* Memory for a block's threads. Every compiled source has its own globals; this they share. */
struct Room {
    Thread* threads;  // MOST_THREADS of each
    Copies* copies;
    unsigned char *stacks, *fixed_shared, *dynamic_shared;
};

inline Room* room;
inline Thread* threads;  // the room's
inline Thread* now;
inline Warp warps[MOST_THREADS / LANES];
inline int thread_count, block_arrived, block_alive;
inline void* scheduler;  // its stack
inline int direction;    // 1 or -1, from lane to lane
inline void (*entry)(void*);
inline void* entry_state;
inline unsigned char* dynamic_memory;  // of this launch: ends where the room's ends
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

/* Go on with `thread`. */
inline void resume(void** from, Thread& thread) {
    now = &thread;
    threadIdx = thread.index;
    znnpy_switch(from, thread.stack_pointer);
}

inline void leave() { znnpy_switch(&now->stack_pointer, scheduler); }

/* Let another lane of the warp go on, the next in order that does not wait; else the scheduler. */
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

/* What each of the 32 lanes gave: all call, and read before their next exchange. */
template <class T> const T* of_all_lanes(T value) {
    static_assert(sizeof(T) <= WIDEST_LANE && std::is_trivially_copyable_v<T>);
    unsigned char* const row = warp().lanes[now->exchanges++ % 2];
    std::memcpy(row + lane() * sizeof(T), &value, sizeof(T));
    warp_barrier();
    return reinterpret_cast<const T*>(row);
}
/* What `compute(T&)` makes of the last exchange, once for all lanes. */
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

/* The same object for all threads of a block. */
template <class T> T& fixed_shared(int key) {
    if (key >= MOST_FIXED_SHARED) fail("too many SHARED arrays for the emulator");
    if (fixed_at[key] < 0) {
        fixed_at[key] = (ptrdiff_t)fixed_used;
        fixed_used = (fixed_used + sizeof(T) + 127) / 128 * 128;
        if (fixed_used > FIXED_SHARED_BYTES) fail("more than 48 KiB of fixed shared memory");
    }
    return *reinterpret_cast<T*>(room->fixed_shared + fixed_at[key]);
}

inline void copy_later(void* to, const void* from, int nbytes, bool valid) {
    if ((size_t)to % nbytes != 0 || (valid && (size_t)from % nbytes != 0))
        fail("cp.async: an address is not a multiple of the bytes to copy");
    Copies& copies = room->copies[now->number];
    if (copies.count == MOST_COPIES) fail("cp.async: too many copies under way for the emulator");
    copies.copy[copies.count++] = {to, from, nbytes, valid};
}
inline void commit_copies() {
    Copies& copies = room->copies[now->number];
    if (copies.groups == MOST_COPIES / 4) fail("cp.async: too many groups under way for the emulator");
    copies.group_end[copies.groups++] = copies.count;
}
/* Make the copies of all but the last `groups_left` committed groups. */
inline void wait_for_copies(int groups_left) {
    Copies& copies = room->copies[now->number];
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

namespace emulator {

inline void run_thread() {
    entry(entry_state);
    now->waits = Waits::ENDED;
    if (--block_alive == block_arrived && block_alive > 0) free_block();
    if (--warp().alive == warp().arrived && warp().alive > 0) free_warp(now->number - lane());
    leave();
    std::abort();
}

inline unsigned char* reserve(size_t nbytes) {
    void* at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) std::abort();
    return static_cast<unsigned char*>(at);
}

/* A new room; it stays as long as the process. */
inline Room* make_room() {
    Room* made = new Room;
    made->threads = reinterpret_cast<Thread*>(reserve(MOST_THREADS * sizeof(Thread)));
    made->copies = reinterpret_cast<Copies*>(reserve(MOST_THREADS * sizeof(Copies)));
    made->stacks = reserve(MOST_THREADS * (STACK_BYTES + PAGE_BYTES));
    for (int i = 0; i < MOST_THREADS; ++i)  // the page below a stack: running over it faults
        mprotect(made->stacks + i * (STACK_BYTES + PAGE_BYTES), PAGE_BYTES, PROT_NONE);
    made->fixed_shared = reserve(FIXED_SHARED_BYTES);
    made->dynamic_shared = reserve(DYNAMIC_SHARED_BYTES + PAGE_BYTES);  // ends at a page that nobody may touch
    mprotect(made->dynamic_shared + DYNAMIC_SHARED_BYTES, PAGE_BYTES, PROT_NONE);
    return made;
}

/* A new stack, as if it had called znnpy_switch just before `run_thread`. */
inline void start(Thread& thread) {
    unsigned char* top = room->stacks + (thread.number + 1) * (STACK_BYTES + PAGE_BYTES);
    top -= 64 * (5 * thread.number % 64);  // else all stacks would fall on the same lines of the cache
#if defined(__x86_64__)
    void** frame = reinterpret_cast<void**>(top) - 8;  // six registers, where to return to, and a word: 16 n + 8
    std::memset(frame, 0, 8 * sizeof(void*));
    frame[6] = reinterpret_cast<void*>(&run_thread);
#else
    void** frame = reinterpret_cast<void**>(top) - 20;
    std::memset(frame, 0, 20 * sizeof(void*));
    frame[1] = reinterpret_cast<void*>(&run_thread);  // x30
#endif
    thread.stack_pointer = frame;
    thread.waits = Waits::NO;
    thread.exchanges = 0;
    room->copies[thread.number].count = room->copies[thread.number].groups = 0;
}

/* Resume lanes of a warp until all wait or have ended; whether one ran. A fault ends it. */
inline bool run_warp(int first) {
    const int lanes = thread_count - first < LANES ? thread_count - first : LANES;
    bool ran = false;
    for (int i = 0; i < lanes && !failed; ++i) {
        Thread& thread = threads[first + (direction > 0 ? i : lanes - 1 - i)];
        if (thread.waits != Waits::NO) continue;
        ran = true;
        resume(&scheduler, thread);
    }
    return ran && !failed;
}

inline void run_block(int turn) {
    block_arrived = 0;
    block_alive = thread_count;
    for (int first = 0; first < thread_count; first += LANES) {
        warps[first / LANES].arrived = warps[first / LANES].result_of = 0;
        warps[first / LANES].alive = thread_count - first < LANES ? thread_count - first : LANES;
    }
    std::memset(dynamic_memory, 0xff, (dynamic_bytes + 127) / 128 * 128);
    std::memset(room->fixed_shared, 0xff, fixed_used);
    for (int i = 0; i < thread_count; ++i) start(threads[i]);
    while (block_alive > 0) {
        bool ran = false;
        direction = turn++ % 2 == 0 ? 1 : -1;
        const int last = (thread_count - 1) / LANES;
        for (int i = 0; i <= last; ++i)
            while (run_warp(LANES * (direction > 0 ? i : last - i))) ran = true;
        if (failed) return;
        if (!ran) {
            int at_block = 0;
            for (int i = 0; i < thread_count; ++i) at_block += threads[i].waits == Waits::BLOCK;
            return describe("%d of %d threads wait at a barrier of the block, %d at one of a warp, and nobody runs", at_block,
                            block_alive, block_alive - at_block);
        }
    }
}

inline void on_fault(int signal, siginfo_t* information, void*) {
    const auto at = static_cast<unsigned char*>(information->si_addr);
    const auto within = [at](const unsigned char* start, size_t nbytes) { return at >= start && at < start + nbytes; };
    if (signal == SIGFPE)
        describe("divides an integer by zero");
    else if (within(room->stacks, MOST_THREADS * (STACK_BYTES + PAGE_BYTES)))
        describe("needs more than %zu KiB of stack", STACK_BYTES >> 10);
    else if (within(room->dynamic_shared, DYNAMIC_SHARED_BYTES + PAGE_BYTES))
        describe("reaches beyond its %zu bytes of dynamic shared memory", dynamic_bytes);
    else
        describe("reaches beyond an array, at %p", static_cast<void*>(at));
    leave();  // the handler is never returned to
}

struct Signals {  // faults of a kernel are ours while it runs
    struct sigaction segmentation, bus, division;
    stack_t stack;

    Signals() {
        struct sigaction ours = {};
        ours.sa_sigaction = on_fault;
        ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
        sigemptyset(&ours.sa_mask);
        sigaction(SIGSEGV, &ours, &segmentation);
        sigaction(SIGBUS, &ours, &bus);
        sigaction(SIGFPE, &ours, &division);
        static unsigned char room[64 << 10];
        stack_t own = {};
        own.ss_sp = room;
        own.ss_size = sizeof room;
        sigaltstack(&own, &stack);
    }
    ~Signals() {
        sigaltstack(&stack, nullptr);
        sigaction(SIGSEGV, &segmentation, nullptr);
        sigaction(SIGBUS, &bus, nullptr);
        sigaction(SIGFPE, &division, nullptr);
    }
};

class ZeroDenormals {  // while it lives; fibers do not change it
  public:
#if defined(__x86_64__)
    ZeroDenormals() : before(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before | 0x8040u); }
    ~ZeroDenormals() { __builtin_ia32_ldmxcsr(before); }

  private:
    unsigned before;
#else
    ZeroDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" ::"r"(before | 1ull << 24));
    }
    ~ZeroDenormals() { asm volatile("msr fpcr, %0" ::"r"(before)); }

  private:
    unsigned long long before;
#endif
};

struct Launch {
    unsigned grid[3], block[3];
    unsigned long long shared_bytes;
};

/* Run `thread(state)` once for every thread of the grid; nullptr, or a sentence about what went wrong. */
inline const char* run(const Launch& launch, void (*thread)(void*), void* state) {
    threads = room->threads;
    gridDim = dim3(launch.grid[0], launch.grid[1], launch.grid[2]);
    blockDim = dim3(launch.block[0], launch.block[1], launch.block[2]);
    thread_count = (int)(blockDim.x * blockDim.y * blockDim.z);
    for (int i = 0; i < thread_count; ++i) {
        threads[i].number = i;
        threads[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    }
    for (ptrdiff_t& at : fixed_at) at = -1;
    fixed_used = 0;
    std::memset(room->fixed_shared, 0xff, FIXED_SHARED_BYTES);
    dynamic_bytes = launch.shared_bytes;
    dynamic_memory = room->dynamic_shared + DYNAMIC_SHARED_BYTES - (dynamic_bytes + 127) / 128 * 128;
    entry = thread;
    entry_state = state;
    failed = false;
    {
        const Signals signals;
        const ZeroDenormals zeros;
        int turn = 0;
        for (unsigned z = 0; z < gridDim.z && !failed; ++z)
            for (unsigned y = 0; y < gridDim.y && !failed; ++y)
                for (unsigned x = 0; x < gridDim.x && !failed; ++x) {
                    blockIdx = {x, y, z};
                    run_block(turn++);
                }
    }
    return failed ? sentence : nullptr;
}

/* Arguments of a kernel, each behind a pointer, as a driver takes them. */
template <class... P> struct Call {
    void (*kernel)(P...);
    void** arguments;

    template <size_t... I> void unpack(std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_reference_t<P>*>(arguments[I])...);
    }
    static void thread(void* self) { static_cast<Call*>(self)->unpack(std::index_sequence_for<P...>()); }
};

template <class... P> const char* launch(void (*kernel)(P...), const Launch* where, void** arguments) {
    Call<P...> call{kernel, arguments};
    return run(*where, Call<P...>::thread, &call);
}

/* "p8 i8 f4 v16": of each parameter what it is (pointer, integer, floating point, else a value) and its bytes. */
template <class... P> const char* parameters(void (*)(P...)) {
    static char text[8 * sizeof...(P) + 1];
    char* at = text;
    ((at += std::sprintf(at, "%c%zu ",
                         std::is_pointer_v<P> ? 'p' : std::is_integral_v<P> ? 'i' : std::is_floating_point_v<P> ? 'f' : 'v',
                         sizeof(P))),
     ...);
    return text;
}

}  // namespace emulator

/* A launch: stacks and shared memory, block after block, faults of the processor reported as a sentence. */
#pragma once

#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <type_traits>
#include <utility>

#include "fibers.hpp"

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

/* New memory for a block; it stays as long as the process. */
inline BlockMemory* make_block_memory() {
    BlockMemory* made = new BlockMemory;
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
    unsigned char* top = block_memory->stacks + (thread.number + 1) * (STACK_BYTES + PAGE_BYTES);
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
    block_memory->copies[thread.number].count = block_memory->copies[thread.number].groups = 0;
}

/* Resume lanes of a warp until all wait or have ended; return whether one ran. A fault ends it. */
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
    std::memset(block_memory->fixed_shared, 0xff, fixed_used);
    for (int i = 0; i < thread_count; ++i) start(threads[i]);
    while (block_alive > 0) {
        bool ran = false;
        direction = turn++ % 2 == 0 ? 1 : -1;
        const int last = (thread_count - 1) / LANES;
        for (int i = 0; i <= last; ++i)
            while (run_warp(LANES * (direction > 0 ? i : last - i))) ran = true;
        if (failed) return;
        if (!ran) {
            int at_block = 0, for_signal = 0;
            for (int i = 0; i < thread_count; ++i) {
                at_block += threads[i].waits == Waits::BLOCK;
                for_signal += threads[i].waits == Waits::SIGNAL;
            }
            if (for_signal > 0)
                return describe("%d of %d threads wait for a signal, %d at a barrier of the block, and nobody runs",
                                for_signal, block_alive, at_block);
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
    else if (within(block_memory->stacks, MOST_THREADS * (STACK_BYTES + PAGE_BYTES)))
        describe("needs more than %zu KiB of stack", STACK_BYTES >> 10);
    else if (within(block_memory->dynamic_shared, DYNAMIC_SHARED_BYTES + PAGE_BYTES))
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
        static unsigned char signal_stack[64 << 10];
        stack_t own = {};
        own.ss_sp = signal_stack;
        own.ss_size = sizeof signal_stack;
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

/* Run `thread(state)` once for every thread of the grid; return nullptr, or a sentence that says what went wrong. */
inline const char* run(const Launch& launch, void (*thread)(void*), void* state) {
    threads = block_memory->threads;
    gridDim = dim3(launch.grid[0], launch.grid[1], launch.grid[2]);
    blockDim = dim3(launch.block[0], launch.block[1], launch.block[2]);
    thread_count = (int)(blockDim.x * blockDim.y * blockDim.z);
    for (int i = 0; i < thread_count; ++i) {
        threads[i].number = i;
        threads[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    }
    for (ptrdiff_t& at : fixed_at) at = -1;
    fixed_used = 0;
    std::memset(block_memory->fixed_shared, 0xff, FIXED_SHARED_BYTES);
    dynamic_bytes = launch.shared_bytes;
    dynamic_memory = block_memory->dynamic_shared + DYNAMIC_SHARED_BYTES - (dynamic_bytes + 127) / 128 * 128;
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

/* "p8 i8 f4 v16": the type of each parameter (pointer, integer, floating point, else a value) and its bytes. */
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

/* The only interface between kernels and the hardware: barriers, shuffles, shared memory, half precision, tensor cores.
 *
 * Every kernel includes this file first and uses the hardware only through it, wgmma.cuh and plain CUDA C++. Each
 * operation has two bodies: instructions of sm_80 and newer, and plain C++ for the tests' emulator, which runs one
 * fiber per CUDA thread on a CPU (`ZNNPY_EMULATOR`; its header tests/support/emulator/emulator.hpp defines CUDA's own names).
 * The emulator proves indexing and arithmetic; timing, bank conflicts and the instructions themselves are proved on a
 * device.
 *
 * Source  CUDA C++ Programming Guide 13.0; PTX ISA 9.0, "Matrix Fragments for mma.m16n8k16 / .m16n8k8", "ldmatrix",
 *         "cp.async".
 * Tested  tests/kernels/gpu/test_device_ops.py
 */
#pragma once

#ifndef ZNNPY_EMULATOR
#include <cuda_fp16.h>
#define INFINITY __int_as_float(0x7f800000)  // constant of <math.h>, which NVRTC lacks
#define NAN __int_as_float(0x7fffffff)
#endif

#define DEVICE __device__ __forceinline__
#ifdef ZNNPY_EMULATOR
#define CALLED inline
#else
#define CALLED __device__ __noinline__  // a function with an address of its own
#endif

/* Shared memory of a block, uninitialised when a block starts.
 *   EXTERN_SHARED(float2, lines);           the launch's bytes, aligned to 128 bytes: `float2* lines`
 *   EXTERN_SHARED_AT(1024, float2, lines);  the same, aligned to 1024 bytes
 *   SHARED(float, tile, [16][17]);          fixed size: `float tile[16][17]`, dimensions in brackets
 */
#ifdef ZNNPY_EMULATOR
#define EXTERN_SHARED_AT(bytes, type, name) type* const name = static_cast<type*>(emulator::dynamic_shared())
#define SHARED(type, name, extents) auto& name = emulator::fixed_shared<type extents>(__COUNTER__)
#else
#define EXTERN_SHARED_AT(bytes, type, name)                          \
    extern __shared__ __align__(bytes) unsigned char znnpy_shared[]; \
    type* const name = reinterpret_cast<type*>(znnpy_shared)
#define SHARED(type, name, extents) __shared__ __align__(16) type name extents
#endif
#define EXTERN_SHARED(type, name) EXTERN_SHARED_AT(128, type, name)

constexpr int WARP = 32;
constexpr unsigned WHOLE_WARP = 0xffffffffu;

/* Barriers for all threads of the block (threads that returned count as arrived), and for all lanes of the warp. */
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

/* Values of other lanes: all 32 lanes must call. float, int, unsigned and 64-bit integers. */
template <class T> DEVICE T shuffle(T value, int lane) { return __shfl_sync(WHOLE_WARP, value, lane); }
template <class T> DEVICE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(WHOLE_WARP, value, mask); }
template <class T> DEVICE T shuffle_down(T value, int by) { return __shfl_down_sync(WHOLE_WARP, value, by); }
template <class T> DEVICE T shuffle_up(T value, int by) { return __shfl_up_sync(WHOLE_WARP, value, by); }

/* This thread of a grid along x; a tensor may have more than 2^31 elements. */
DEVICE long long global_thread() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE long long global_threads() { return (long long)gridDim.x * blockDim.x; }

/* float16, rounded to nearest even; beyond 65504 it becomes infinite. */
DEVICE half to_half(float value) { return __float2half_rn(value); }
DEVICE float to_float(half value) { return __half2float(value); }
DEVICE float to_float(float value) { return value; }
DEVICE half2 to_half2(float x, float y) { return __floats2half2_rn(x, y); }

/* A value of type T; infinity for the largest finite one, which plans of cuDNN may give for values beyond the range. */
template <class T> DEVICE float not_clamped(float value) {
    const float largest = sizeof(T) == 2 ? 65504.0f : 3.402823466e38f;
    return fabsf(value) == largest ? copysignf(INFINITY, value) : value;
}

DEVICE float2 to_float2(half2 pair) { return __half22float2(pair); }

DEVICE unsigned bits_of(float value) { return __float_as_uint(value); }
DEVICE float from_bits(unsigned bits) { return __uint_as_float(bits); }
DEVICE unsigned bits_of(half2 pair) { return *reinterpret_cast<unsigned*>(&pair); }
DEVICE half2 half2_from_bits(unsigned bits) { return *reinterpret_cast<half2*>(&bits); }

/* Activations: T is float or half, arithmetic is in float. The wide ones need addresses aligned to 4 * sizeof(T), 2 *
 * ...
 */
DEVICE float load_activation(const float* from) { return __ldg(from); }
DEVICE float load_activation(const half* from) { return to_float(__ldg(from)); }
DEVICE float2 load_activation2(const float* from) { return __ldg(reinterpret_cast<const float2*>(from)); }
DEVICE float2 load_activation2(const half* from) { return to_float2(__ldg(reinterpret_cast<const half2*>(from))); }
DEVICE float4 load_activation4(const float* from) { return __ldg(reinterpret_cast<const float4*>(from)); }
DEVICE float4 load_activation4(const half* from) {
    const uint2 bits = __ldg(reinterpret_cast<const uint2*>(from));
    const float2 low = to_float2(half2_from_bits(bits.x)), high = to_float2(half2_from_bits(bits.y));
    return make_float4(low.x, low.y, high.x, high.y);
}
DEVICE void store_activation(float* to, float value) { *to = value; }
DEVICE void store_activation(half* to, float value) { *to = to_half(value); }
DEVICE void store_activation2(float* to, float2 v) { *reinterpret_cast<float2*>(to) = v; }
DEVICE void store_activation2(half* to, float2 v) { *reinterpret_cast<half2*>(to) = to_half2(v.x, v.y); }
DEVICE void store_activation4(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }
DEVICE void store_activation4(half* to, float4 v) {
    *reinterpret_cast<uint2*>(to) = make_uint2(bits_of(to_half2(v.x, v.y)), bits_of(to_half2(v.z, v.w)));
}

/* The larger of two values, for each element; NaN if one of them is. */
DEVICE float maximum(float a, float b);
DEVICE half2 maximum(half2 a, half2 b) { return __hmax2_nan(a, b); }
DEVICE half maximum(half a, half b);

/* Peaks: *peak = max(*peak, |value|), whatever the order of threads. The bits of |x| grow with |x|, and those of
 * infinity and NaN are above all numbers, so they win and stay. A null peak: not wanted.
 */
DEVICE unsigned magnitude_bits(float value) { return bits_of(value) & 0x7fffffffu; }
#ifdef ZNNPY_EMULATOR
DEVICE float larger_magnitude(float peak, float value) {
    return from_bits(max(magnitude_bits(peak), magnitude_bits(value)));
}
#else
DEVICE float larger_magnitude(float peak, float value) {  // one instruction, including |x|
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(peak)), "f"(fabsf(value)));
    return larger;
}
#endif
DEVICE void raise_peak(float* peak, float value) {
    if (peak == nullptr) return;
    const unsigned bits = magnitude_bits(value);
    unsigned* const word = reinterpret_cast<unsigned*>(peak);
    if (bits > *static_cast<volatile unsigned*>(word)) atomicMax(word, bits);  // it only grows: most skip this
}
/* One atomic per warp; all 32 lanes must call. */
DEVICE void raise_peak_by_warp(float* peak, float value) {
    if (peak == nullptr) return;
    for (int mask = WARP / 2; mask > 0; mask /= 2) value = larger_magnitude(value, shuffle_xor(value, mask));
    if (((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x) % WARP == 0) raise_peak(peak, value);
}

/* Computes d += a b for one warp: a 16 x 16 float16, b 16 x 8 float16, d 16 x 8 float32 in the registers of
 * mma.m16n8k16. Lane l = 4 g + t holds, two float16 in a word with the lower index in the lower half:
 *   a[0] = A[g][2t, 2t+1], a[1] = A[g+8][2t, +1], a[2] = A[g][2t+8, +1], a[3] = A[g+8][2t+8, +1]
 *   b[0] = B[2t, 2t+1][g], b[1] = B[2t+8, 2t+9][g]
 *   d[0], d[1] = D[g][2t, 2t+1], d[2], d[3] = D[g+8][2t, 2t+1]
 */
DEVICE void mma_half(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

/* Computes the same in tf32: a 16 x 8, b 8 x 8, words from `to_tf32`, in the layout of mma.m16n8k8:
 *   a[0] = A[g][t], a[1] = A[g+8][t], a[2] = A[g][t+4], a[3] = A[g+8][t+4];  b[0] = B[t][g], b[1] = B[t+4][g]
 */
DEVICE void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

/* The word of a tf32: 10 bits of mantissa, rounded to nearest, ties away from zero. */
DEVICE unsigned to_tf32(float value);

/* Loads four or two 8 x 8 matrices of 16-bit elements from shared memory: lane 8 i + r passes the address of row r of
 * matrix i (16 bytes, aligned to 16), and word i of lane 4 g + t becomes elements 2t, 2t+1 of row g; transposed: of
 * column g. All lanes must call; for two matrices only addresses of lanes 0..15 are read.
 */
DEVICE void ldmatrix(unsigned (&words)[4], const void* row);
DEVICE void ldmatrix(unsigned (&words)[2], const void* row);
DEVICE void ldmatrix_transposed(unsigned (&words)[4], const void* row);
DEVICE void ldmatrix_transposed(unsigned (&words)[2], const void* row);

/* Asynchronous copies from global to shared memory: BYTES is 4, 8 or 16, both addresses are multiples of it. With
 * `valid` false nothing is read and zeros are written. They are complete after `cp_async_wait<N>` (all but the last N
 * committed groups of this thread) and a barrier.
 */
template <int BYTES> DEVICE void cp_async(void* shared, const void* global, bool valid = true);
DEVICE void cp_async_commit();
template <int N> DEVICE void cp_async_wait();

#ifndef ZNNPY_EMULATOR

DEVICE float maximum(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}
DEVICE half maximum(half a, half b) { return __hmax_nan(a, b); }

DEVICE unsigned shared_address(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

DEVICE void mma_half(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE unsigned to_tf32(float value) {
    unsigned word;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(value));
    return word;
}

DEVICE void ldmatrix(unsigned (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void ldmatrix(unsigned (&words)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void ldmatrix_transposed(unsigned (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void ldmatrix_transposed(unsigned (&words)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(shared_address(row))
                 : "memory");
}

template <int BYTES> DEVICE void cp_async(void* shared, const void* global, bool valid) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    const int read = valid ? BYTES : 0;
    if constexpr (BYTES == 16)  // past L1: the data are not read again from there
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                     "r"(read)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global),
                     "n"(BYTES), "r"(read)
                     : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

#else  // the emulator

namespace twin {
// Element `column` of row `row` of the 16-bit matrix whose 8 row addresses are those of lanes first..first+7.
inline unsigned short element(const void* const* rows, int first, int row, int column) {
    return static_cast<const unsigned short*>(rows[first + row])[column];
}
template <int COUNT> inline void load_matrices(unsigned (&words)[COUNT], const void* row, bool transposed) {
    const void* const* rows = emulator::of_all_lanes(row);
    const int g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int i = 0; i < COUNT; ++i) {
        if (reinterpret_cast<unsigned long long>(rows[8 * i + g]) % 16 != 0) emulator::fail("ldmatrix: misaligned row");
        const unsigned low = transposed ? element(rows, 8 * i, 2 * t, g) : element(rows, 8 * i, g, 2 * t);
        const unsigned high = transposed ? element(rows, 8 * i, 2 * t + 1, g) : element(rows, 8 * i, g, 2 * t + 1);
        words[i] = low | high << 16;
    }
}
struct Operands {  // operands of one lane, as numbers: the lower half of a word first
    float a[8], b[4];
};
inline Operands numbers_of(const unsigned (&a)[4], const unsigned (&b)[2]) {
    Operands all;
    for (int word = 0; word < 6; ++word) {
        const float2 pair = to_float2(half2_from_bits(word < 4 ? a[word] : b[word - 4]));
        float* const to = word < 4 ? all.a + 2 * word : all.b + 2 * (word - 4);
        to[0] = pair.x, to[1] = pair.y;
    }
    return all;
}
typedef float Row __attribute__((vector_size(32)));  // 8 columns
struct Product {
    Row rows[16];
};
inline void multiply(const Operands* lanes, Product& product) {
    float left[16][16];
    Row right[16];
    for (int lane = 0; lane < WARP; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 8; ++i) left[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = lanes[lane].a[i];
        for (int i = 0; i < 4; ++i) right[2 * t + i % 2 + i / 2 * 8][g] = lanes[lane].b[i];
    }
    for (int row = 0; row < 16; ++row) {
        Row sum = {};
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k];
        product.rows[row] = sum;
    }
}
inline float tf32_of(unsigned word) { return from_bits(word & 0xffffe000u); }  // the bits that the unit reads
}  // namespace twin

DEVICE void mma_half(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const twin::Operands* lanes = emulator::of_all_lanes(twin::numbers_of(a, b));
    const twin::Product& product =
        emulator::once_a_warp<twin::Product>([lanes](twin::Product& all) { twin::multiply(lanes, all); });
    const int g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int i = 0; i < 4; ++i) d[i] += product.rows[g + i / 2 * 8][2 * t + i % 2];
}

DEVICE void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    struct Words {
        unsigned a[4], b[2];
    };
    const Words* lanes = emulator::of_all_lanes(Words{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
    const int g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int i = 0; i < 4; ++i) {
        const int lower = i / 2;
        const Words *left = lanes + 4 * g, *right = lanes + 4 * (2 * t + i % 2);
        float sum = d[i];
        for (int k = 0; k < 8; ++k)
            sum += twin::tf32_of(left[k % 4].a[k / 4 * 2 + lower]) * twin::tf32_of(right[k % 4].b[k / 4]);
        d[i] = sum;
    }
}

DEVICE float maximum(float a, float b) { return a != a || a > b ? a : b; }
DEVICE half maximum(half a, half b) { return to_half(maximum(to_float(a), to_float(b))); }

DEVICE unsigned to_tf32(float value) {
    const unsigned bits = bits_of(value);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}

DEVICE void ldmatrix(unsigned (&words)[4], const void* row) { twin::load_matrices(words, row, false); }
DEVICE void ldmatrix(unsigned (&words)[2], const void* row) { twin::load_matrices(words, row, false); }
DEVICE void ldmatrix_transposed(unsigned (&words)[4], const void* row) { twin::load_matrices(words, row, true); }
DEVICE void ldmatrix_transposed(unsigned (&words)[2], const void* row) { twin::load_matrices(words, row, true); }

template <int BYTES> DEVICE void cp_async(void* shared, const void* global, bool valid) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    emulator::copy_later(shared, global, BYTES, valid);
}
DEVICE void cp_async_commit() { emulator::commit_copies(); }
template <int N> DEVICE void cp_async_wait() { emulator::wait_for_copies(N); }

#endif

/* CUDA's types and arithmetic as plain C++: vectors, half precision, the functions that kernels call. */
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

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

/* Loading of voxels as factors of float16 products: 8 values at a time, as one word or two.
 *
 * Tested  tests/kernels/gpu/implicit_gemm/test_primitive.py
 */
#pragma once

#include "device_ops.cuh"

constexpr int PIECE = 8;   // values that a thread loads at once, as in tensor.py
constexpr float TOP = 14;  // values are scaled to less than 2^TOP, as in tensor.py

/* n / d for 0 <= n < 2^20, by 1 / d. */
DEVICE int quotient(int n, float reciprocal) { return (int)((n + 0.5f) * reciprocal); }

/* n / d for 0 <= n < 2^31 - 64: an estimate by 1 / d, then corrections. */
DEVICE int divided(int n, int d, float reciprocal) {
    int q = (int)(n * reciprocal);
    while ((long long)q * d > n) --q;
    while (n - (long long)q * d >= d) ++q;
    return q;
}

/* 8 values, maps of a voxel or voxels of a map, in transit from memory to the region. UNPACKED: each in a register of its
 * own, so that nothing waits for them before `put`.
 */
template <class T, bool UNPACKED = false> struct Piece;
template <> struct Piece<half, true> {
    unsigned short values[PIECE];
    DEVICE void load_line(const half* from, int stride, int first, int last) {
#pragma unroll
        for (int i = 0; i < PIECE; ++i)
            values[i] = i >= first && i < last ? __ldg(reinterpret_cast<const unsigned short*>(from) + i * stride) : 0;
    }
    template <int WORDS> DEVICE void put(half* to, int, float) const {
        unsigned both[PIECE / 2];
#pragma unroll
        for (int i = 0; i < PIECE / 2; ++i) both[i] = values[2 * i] | (unsigned)values[2 * i + 1] << 16;
        *reinterpret_cast<uint4*>(to) = make_uint4(both[0], both[1], both[2], both[3]);
    }
};
template <> struct Piece<half> {
    uint4 words;
    DEVICE void clear() { words = make_uint4(0, 0, 0, 0); }
    DEVICE void load(const half* from) { words = __ldg(reinterpret_cast<const uint4*>(from)); }
    DEVICE void load_line(const half* from, int stride, int first, int last) {
        Piece<half, true> line;
        line.load_line(from, stride, first, last);
        line.put<1>(reinterpret_cast<half*>(&words), 0, 1.0f);
    }
    template <int WORDS> DEVICE void put(half* to, int, float) const { *reinterpret_cast<uint4*>(to) = words; }
};
template <bool UNPACKED> struct Piece<float, UNPACKED> {
    float values[PIECE];
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < PIECE; ++i) values[i] = 0.0f;
    }
    DEVICE void load(const float* from) {
        const float4 low = load_activation4(from), high = load_activation4(from + 4);
        values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
        values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    }
    DEVICE void load_line(const float* from, int stride, int first, int last) {
#pragma unroll
        for (int i = 0; i < PIECE; ++i) values[i] = i >= first && i < last ? load_activation(from + i * stride) : 0.0f;
    }
    template <int WORDS> DEVICE void put(half* to, int second_word, float scale) const {
        unsigned high[PIECE / 2], low[PIECE / 2];
#pragma unroll
        for (int i = 0; i < PIECE / 2; ++i) {
            const float a = scale * values[2 * i], b = scale * values[2 * i + 1];
            const half2 both = to_half2(a, b);
            const float2 kept = to_float2(both);
            high[i] = bits_of(both), low[i] = bits_of(to_half2(a - kept.x, b - kept.y));
        }
        *reinterpret_cast<uint4*>(to) = make_uint4(high[0], high[1], high[2], high[3]);
        if (WORDS == 2) *reinterpret_cast<uint4*>(to + second_word) = make_uint4(low[0], low[1], low[2], low[3]);
    }
};

/* A power of two that scales values up to `peak` below 2^TOP; 1 if there is no peak, or it is not a positive finite
 * number.
 */
DEVICE float scale_of(const float* peak) {
    if (peak == nullptr || !(*peak > 0.0f) || *peak == INFINITY) return 1.0f;
    const int e = (int)TOP - 1 - ilogbf(*peak);
    return scalbnf(1.0f, e < -120 ? -120 : e > 120 ? 120 : e);
}

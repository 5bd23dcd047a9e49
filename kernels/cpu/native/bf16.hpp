// Values in bfloat16: float32 without its last 16 bits. They are computed with as vectors of floats; a value that is
// written is rounded to the nearest, ties to even.
#pragma once
#include "vector.hpp"

namespace znnpy {

struct Bf16 {
  uint16_t bits;
};

typedef uint16_t Half __attribute__((vector_size(2 * W)));
typedef uint16_t UnalignedHalf __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));

ALWAYS V widen(Half h) { return (V)(__builtin_convertvector(h, Bits) << 16); }

ALWAYS Half narrow(V v) {
#if defined(__AVX512BF16__)
  return (Half)_mm512_cvtneps_pbh((__m512)v);
#else
  const Bits bits = (Bits)v, odd = bits >> 16 & 1, quiet = bits >> 16 | 0x40;
  const Bits nan = (Bits)(v != v);  // all ones where a value is not a number
  return __builtin_convertvector((nan & quiet) | (~nan & (bits + 0x7fff + odd) >> 16), Half);
#endif
}

ALWAYS float widen(Bf16 value) {
  const uint32_t bits = (uint32_t)value.bits << 16;
  float found;
  __builtin_memcpy(&found, &bits, sizeof found);
  return found;
}

ALWAYS Bf16 narrow(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  if (value != value) return {(uint16_t)(bits >> 16 | 0x40)};
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

ALWAYS V load(const Bf16 *p) { return widen((Half) * reinterpret_cast<const UnalignedHalf *>(p)); }
ALWAYS void store(Bf16 *p, V v) { *reinterpret_cast<UnalignedHalf *>(p) = narrow(v); }

// Loads the first `count` lanes (all of them if more), zero in the others; touches no other memory.
ALWAYS V load_part(const Bf16 *p, int count) {
  if (count >= W) return load(p);
  Half h{};
  for (int i = 0; i < count; i++) h[i] = p[i].bits;
  return widen(h);
}

ALWAYS void store_part(Bf16 *p, V v, int count) {
  if (count >= W) return store(p, v);
  const Half h = narrow(v);
  for (int i = 0; i < count; i++) p[i].bits = h[i];
}

// A full store that neither reads the line first nor keeps it in the cache; the compiler joins two that fill a line.
ALWAYS void stream(Bf16 *p, V v) {
#if defined(__AVX512F__)
  _mm256_stream_si256((__m256i *)p, (__m256i)narrow(v));
#elif defined(__AVX2__)
  _mm_stream_si128((__m128i *)p, (__m128i)narrow(v));
#else
  store(p, v);
#endif
}

}  // namespace znnpy

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

// Conversions between vectors are instructions of their own: what compilers make of __builtin_convertvector takes twice
// as many. They have a mask of all lanes because g++ warns of those without one.
#if defined(__AVX512F__)
constexpr __mmask16 ALL = (__mmask16)-1;
#endif

ALWAYS V widen(Half h) {
#if defined(__AVX512F__)
  return (V)((Bits)_mm512_maskz_cvtepu16_epi32(ALL, (__m256i)h) << 16);
#elif defined(__AVX2__)
  return (V)((Bits)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
  return (V)(__builtin_convertvector(h, Bits) << 16);
#endif
}

// Returns the upper halves of all lanes: the values themselves, where these are such of bfloat16.
ALWAYS Half upper_half(Bits bits) {
#if defined(__AVX512F__)
  return (Half)_mm512_maskz_cvtepi32_epi16(ALL, (__m512i)(bits >> 16));
#elif defined(__AVX2__)
  const __m256i words = (__m256i)(bits >> 16);
  return (Half)_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8));
#else
  return __builtin_convertvector(bits >> 16, Half);
#endif
}

// Rounds; what arithmetic gives where there is no number stays no number.
ALWAYS Half narrow(V v) {
#if defined(__AVX512BF16__)
  return (Half)_mm512_cvtneps_pbh((__m512)v);
#elif defined(__AVX512F__)
  const Bits bits = (Bits)v, odd = bits >> 16 & 1;
  const __m512i all = (__m512i)bits, half = (__m512i)(odd + 0x7fff);
  const __mmask16 number = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_ORD_Q);
  return upper_half((Bits)_mm512_mask_add_epi32(all, number, all, half));
#else
  const Bits bits = (Bits)v, odd = bits >> 16 & 1, number = (Bits)(v == v);  // number: all ones, or zero for NaN
  return upper_half(bits + ((odd + 0x7fff) & number));
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
#if defined(__AVX512F__)
  h = (Half)_mm256_maskz_loadu_epi16((__mmask16)((1u << (count < 0 ? 0 : count)) - 1), p);
#else
  for (int i = 0; i < count; i++) h[i] = p[i].bits;
#endif
  return widen(h);
}

ALWAYS void store_part(Bf16 *p, V v, int count) {
  if (count >= W) return store(p, v);
  const Half h = narrow(v);
#if defined(__AVX512F__)
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << (count < 0 ? 0 : count)) - 1), (__m256i)h);
#else
  for (int i = 0; i < count; i++) p[i].bits = h[i];
#endif
}

// Writes past the caches, as with floats; the address is a multiple of the bytes that are written.
ALWAYS void stream(Bf16 *p, Half h) {
#if defined(__AVX512F__)
  _mm256_stream_si256(reinterpret_cast<__m256i *>(p), (__m256i)h);
#elif defined(__AVX2__)
  _mm_stream_si128(reinterpret_cast<__m128i *>(p), (__m128i)h);
#else
  *reinterpret_cast<UnalignedHalf *>(p) = h;
#endif
}
ALWAYS void stream(Bf16 *p, V v) { stream(p, narrow(v)); }

// Writes values that the type holds, such as the largest of some: nothing is rounded.
ALWAYS void store_exact(float *p, V v) { store(p, v); }
ALWAYS void store_exact(Bf16 *p, V v) { *reinterpret_cast<UnalignedHalf *>(p) = upper_half((Bits)v); }
ALWAYS void stream_exact(float *p, V v) { stream(p, v); }
ALWAYS void stream_exact(Bf16 *p, V v) { stream(p, upper_half((Bits)v)); }

// Returns the value at p in every lane.
ALWAYS V broadcast_at(const float *p) { return broadcast(*p); }
ALWAYS V broadcast_at(const Bf16 *p) {
#if defined(__AVX512F__)
  return (V)((Bits)_mm512_set1_epi16((short)p->bits) << 16);
#elif defined(__AVX2__)
  return (V)((Bits)_mm256_set1_epi16((short)p->bits) << 16);
#else
  return broadcast(widen(*p));
#endif
}

// Single values of either type.
ALWAYS float widen(float value) { return value; }
ALWAYS void put(float *p, float value) { *p = value; }
ALWAYS void put(Bf16 *p, float value) { *p = narrow(value); }

// Copies a value, or the values of a vector. Between arrays of one type no bit changes.
ALWAYS void copy_value(const float *source, Bf16 *target) { *target = narrow(*source); }
ALWAYS void copy_value(const Bf16 *source, float *target) { *target = widen(*source); }
template <class E>
ALWAYS void copy_value(const E *source, E *target) {
  *target = *source;
}
template <class S, class T>
ALWAYS void copy_vector(const S *source, T *target) {
  store(target, load(source));
}
ALWAYS void copy_vector(const Bf16 *source, Bf16 *target) {
  *reinterpret_cast<UnalignedHalf *>(target) = *reinterpret_cast<const UnalignedHalf *>(source);
}
template <class S, class T>
ALWAYS void stream_vector(const S *source, T *target) {
  stream(target, load(source));
}
ALWAYS void stream_vector(const Bf16 *source, Bf16 *target) {
  stream(target, (Half) * reinterpret_cast<const UnalignedHalf *>(source));
}

// Calls f(Bf16{}) or f(float{}): what depends on the type of an array's elements is written once. Each call is a
// function of its own, since compilers run out of registers where loops for both types share one.
template <class F, class E>
__attribute__((noinline)) auto call_with(F f, E type) {
  return f(type);
}
template <class F>
ALWAYS auto with_type(int64_t bf16, F f) {
  return bf16 ? call_with(f, Bf16{}) : call_with(f, 0.0f);
}

}  // namespace znnpy

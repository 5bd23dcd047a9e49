// Transforms of 8, 16, 24 or 32 complex numbers in the registers of one thread.
//
// N = 4 M: M transforms of 4, twiddle factors, 4 transforms of M. All loops unroll, so every index is a constant and
// nothing goes to local memory. Sign -1: forward, e^(-2 pi i n k / N); +1: inverse, not divided by N.
#pragma once
#include "device_ops.cuh"

// A complex number, and a pair of them in float16: arithmetic of the latter is rounded at every step, and twice as
// fast.
struct Complex {
  float re, im;
};
struct Twins {
  half2 re, im;
};

DEVICE float add(float a, float b) { return a + b; }
DEVICE float subtract(float a, float b) { return a - b; }
DEVICE float negative(float a) { return -a; }
DEVICE float times(float c, float a) { return c * a; }
DEVICE float times_add(float c, float a, float b) { return c * a + b; }
DEVICE half2 add(half2 a, half2 b) { return __hadd2(a, b); }
DEVICE half2 subtract(half2 a, half2 b) { return __hsub2(a, b); }
DEVICE half2 negative(half2 a) { return __hneg2(a); }
DEVICE half2 times(float c, half2 a) { return __hmul2(to_half2(c, c), a); }
DEVICE half2 times_add(float c, half2 a, half2 b) { return __hfma2(to_half2(c, c), a, b); }

template <class C>
DEVICE C operator+(C a, C b) { return {add(a.re, b.re), add(a.im, b.im)}; }
template <class C>
DEVICE C operator-(C a, C b) { return {subtract(a.re, b.re), subtract(a.im, b.im)}; }
template <class C>
DEVICE C times(float c, C a) { return {times(c, a.re), times(c, a.im)}; }

template <int Sign, class C>
DEVICE C times_i(C a) {  // a * (Sign i)
  return Sign > 0 ? C{negative(a.im), a.re} : C{a.im, negative(a.re)};
}

// cos(2 pi e / 96), 0 <= e: a constant once loops are unrolled.
DEVICE constexpr float cosine96(int e) {
  constexpr float quarter[25] = {
      1.0f, 0.99785892323860348f, 0.99144486137381038f, 0.98078528040323043f, 0.96592582628906831f,
      0.94693012949510569f, 0.92387953251128674f, 0.89687274153268837f, 0.86602540378443871f, 0.83146961230254524f,
      0.79335334029123517f, 0.75183980747897738f, 0.70710678118654757f, 0.65934581510006884f, 0.60876142900872066f,
      0.5555702330196024f, 0.50000000000000011f, 0.44228869021900125f, 0.38268343236508984f, 0.3214394653031617f,
      0.25881904510252074f, 0.19509032201612833f, 0.13052619222005171f, 0.06540312923014327f, 0.0f,
  };
  e %= 96;
  if (e > 48) e = 96 - e;
  return e <= 24 ? quarter[e] : -quarter[48 - e];
}

// a * e^(Sign 2 pi i e / N).
template <int N, int Sign, class C>
DEVICE C turned(C a, int e) {
  static_assert(96 % N == 0, "roots are tabulated for divisors of 96");
  const float c = cosine96(96 / N * e), s = Sign * cosine96(96 / N * e + 72);  // sin(a) = cos(a - pi / 2)
  return {times_add(-s, a.im, times(c, a.re)), times_add(s, a.re, times(c, a.im))};
}

template <int M, int Sign>
struct SmallTransform;

template <int Sign>
struct SmallTransform<2, Sign> {
  template <class C>
  static DEVICE void run(C (&v)[2]) {
    C a = v[0], b = v[1];
    v[0] = a + b;
    v[1] = a - b;
  }
};

template <int Sign>
struct SmallTransform<3, Sign> {
  template <class C>
  static DEVICE void run(C (&v)[3]) {
    const C sum = v[1] + v[2], across = times_i<Sign>(times(0.86602540378443864676f, v[1] - v[2]));
    const C middle = v[0] + times(-0.5f, sum);
    v[0] = v[0] + sum;
    v[1] = middle + across;
    v[2] = middle - across;
  }
};

template <int Sign>
struct SmallTransform<4, Sign> {
  template <class C>
  static DEVICE void run(C (&v)[4]) {
    C s0 = v[0] + v[2], s1 = v[0] - v[2], s2 = v[1] + v[3], s3 = times_i<Sign>(v[1] - v[3]);
    v[0] = s0 + s2;
    v[1] = s1 + s3;
    v[2] = s0 - s2;
    v[3] = s1 - s3;
  }
};

// M = 2 H: two transforms of H, then butterflies.
template <int M, int Sign>
struct SmallTransform {
  template <class C>
  static DEVICE void run(C (&v)[M]) {
    constexpr int H = M / 2;
    C even[H], odd[H];
#pragma unroll
    for (int n = 0; n < H; n++) {
      even[n] = v[2 * n];
      odd[n] = v[2 * n + 1];
    }
    SmallTransform<H, Sign>::run(even);
    SmallTransform<H, Sign>::run(odd);
#pragma unroll
    for (int k = 0; k < H; k++) {
      C t = k == 0 ? odd[0] : 4 * k == M ? times_i<Sign>(odd[k]) : turned<M, Sign>(odd[k], k);
      v[k] = even[k] + t;
      v[k + H] = even[k] - t;
    }
  }
};

// Transforms N numbers in place; the result is in natural order.
template <int N, int Sign, class C>
DEVICE void transform(C (&x)[N]) {
  constexpr int M = N / 4;
  C a[4][M];
#pragma unroll
  for (int n = 0; n < M; n++) {
    C v[4] = {x[n], x[n + M], x[n + 2 * M], x[n + 3 * M]};
    SmallTransform<4, Sign>::run(v);
    a[0][n] = v[0];
#pragma unroll
    for (int k = 1; k < 4; k++) a[k][n] = n == 0 ? v[k] : turned<N, Sign>(v[k], n * k);
  }
#pragma unroll
  for (int k = 0; k < 4; k++) {
    SmallTransform<M, Sign>::run(a[k]);
#pragma unroll
    for (int m = 0; m < M; m++) x[k + 4 * m] = a[k][m];
  }
}

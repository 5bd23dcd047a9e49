// Straight-line discrete Fourier transforms of short lines, with the same instructions for all channels of a vector.
// Cooley, Tukey 1965: decimation in time, radix 4, 2 and odd primes; real transforms by halves.
#pragma once
#include "vector.hpp"

namespace znnpy {

constexpr double PI = 3.14159265358979323846264338327950288;

constexpr double sine(double x) {  // |x| <= pi
  double term = x, sum = x;
  for (int n = 1; n < 24; n++) {
    term *= -x * x / ((2 * n) * (2 * n + 1));
    sum += term;
  }
  return sum;
}
constexpr double cosine(double x) {
  double term = 1, sum = 1;
  for (int n = 1; n < 24; n++) {
    term *= -x * x / ((2 * n - 1) * (2 * n));
    sum += term;
  }
  return sum;
}

// cos and sin of 2 pi K / N.
template <int N, int K>
struct Twiddle {
  static constexpr int k = ((K % N) + N) % N;
  static constexpr double angle = 2 * PI * (2 * k > N ? k - N : k) / N;
  static constexpr float c = (float)cosine(angle), s = (float)sine(angle);
};

// Returns a * exp(-2 pi i K / N), or its inverse rotation if INVERSE.
template <int N, int K, bool INVERSE>
ALWAYS C rotate(C a) {
  constexpr int k = (((INVERSE ? -K : K) % N) + N) % N;
  if constexpr (k == 0) return a;
  else if constexpr (2 * k == N) return {-a.re, -a.im};
  else if constexpr (4 * k == N) return {a.im, -a.re};
  else if constexpr (4 * k == 3 * N) return {-a.im, a.re};
  else if constexpr (8 * k % N == 0) {  // cos and sin are +-sqrt(1/2)
    constexpr float c = Twiddle<N, k>::c, s = Twiddle<N, k>::s;
    constexpr float root = 0.70710678118654752440f;
    const V sum = (a.re + a.im) * root, difference = (a.re - a.im) * root;
    if constexpr (c > 0 && s > 0) return {sum, -difference};
    else if constexpr (c < 0 && s > 0) return {-difference, -sum};
    else if constexpr (c < 0 && s < 0) return {-sum, difference};
    else return {difference, sum};
  } else {
    constexpr float c = Twiddle<N, k>::c, s = Twiddle<N, k>::s;
    return {a.re * c + a.im * s, a.im * c - a.re * s};
  }
}

constexpr int radix(int n) { return n % 4 == 0 ? 4 : n % 2 == 0 ? 2 : n % 3 == 0 ? 3 : n % 5 == 0 ? 5 : n; }

template <int R, bool INVERSE>
ALWAYS void butterfly(C (&x)[R]) {
  if constexpr (R == 2) {
    const C a = x[0], b = x[1];
    x[0] = a + b;
    x[1] = a - b;
  } else if constexpr (R == 4) {
    const C s = x[0] + x[2], d = x[0] - x[2], t = x[1] + x[3], e = rotate<4, 1, INVERSE>(x[1] - x[3]);
    x[0] = s + t;
    x[1] = d + e;
    x[2] = s - t;
    x[3] = d - e;
  } else if constexpr (R > 2) {  // an odd prime: by pairs j, R - j
    constexpr int H = R / 2;
    C sum[H], difference[H], first = x[0];
    unroll<H>([&](auto j) ALWAYS_LAMBDA {
      sum[j] = x[j + 1] + x[R - 1 - j];
      difference[j] = x[j + 1] - x[R - 1 - j];
      first = first + sum[j];
    });
    const C base = x[0];
    x[0] = first;
    unroll<H>([&](auto k) ALWAYS_LAMBDA {
      C even = base, odd{};
      unroll<H>([&](auto j) ALWAYS_LAMBDA {
        constexpr int at = (decltype(j)::value + 1) * (decltype(k)::value + 1);
        constexpr float c = Twiddle<R, at>::c, s = Twiddle<R, at>::s;
        even = {even.re + sum[j].re * c, even.im + sum[j].im * c};
        if constexpr (decltype(j)::value == 0) odd = {difference[j].re * s, difference[j].im * s};
        else odd = {odd.re + difference[j].re * s, odd.im + difference[j].im * s};
      });
      const C rotated = rotate<4, 1, INVERSE>(odd);
      x[k + 1] = even + rotated;
      x[R - 1 - k] = even - rotated;
    });
  }
}

// Computes out[k] = sum over j of in(first + stride j) exp(-+ 2 pi i j k / N).
template <int N, bool INVERSE, int FIRST, int STRIDE, class Load>
ALWAYS void transform(const Load &in, C *out) {
  if constexpr (N == 1) {
    out[0] = in(std::integral_constant<int, FIRST>{});
  } else {
    constexpr int R = radix(N), M = N / R;
    unroll<R>([&](auto r) ALWAYS_LAMBDA {
      constexpr int at = decltype(r)::value;
      transform<M, INVERSE, FIRST + at * STRIDE, STRIDE * R>(in, out + at * M);
    });
    unroll<M>([&](auto k) ALWAYS_LAMBDA {
      C x[R];
      unroll<R>([&](auto r) ALWAYS_LAMBDA {
        x[r] = rotate<N, decltype(r)::value * decltype(k)::value, INVERSE>(out[k + r * M]);
      });
      butterfly<R, INVERSE>(x);
      unroll<R>([&](auto r) ALWAYS_LAMBDA { out[k + r * M] = x[r]; });
    });
  }
}

// Transforms a real line into out[0 .. N/2]; the imaginary parts of out[0], and of out[N/2] if N is even, are zero.
template <int N, int FIRST, int STRIDE, class Load>
ALWAYS void transform_real(const Load &in, C *out) {
  if constexpr (N == 1) {
    out[0] = {in(std::integral_constant<int, FIRST>{}), V{}};
  } else if constexpr (N % 2 == 0) {
    constexpr int M = N / 2;
    C even[M / 2 + 1], odd[M / 2 + 1];
    transform_real<M, FIRST, 2 * STRIDE>(in, even);
    transform_real<M, FIRST + STRIDE, 2 * STRIDE>(in, odd);
    unroll<M / 2 + 1>([&](auto index) ALWAYS_LAMBDA {
      constexpr int k = decltype(index)::value;
      if constexpr (k == 0) {
        out[0] = {even[0].re + odd[0].re, V{}};
        out[M] = {even[0].re - odd[0].re, V{}};
      } else if constexpr (2 * k == M) {
        out[k] = {even[k].re, -odd[k].re};
      } else {
        const C rotated = rotate<N, k, false>(odd[k]);
        out[k] = even[k] + rotated;
        out[M - k] = conj(even[k] - rotated);
      }
    });
  } else {
    constexpr int R = radix(N), M = N / R;
    if constexpr (M == 1) {
      constexpr int H = N / 2;
      const V base = in(std::integral_constant<int, FIRST>{});
      V sum[H], difference[H], first = base;
      unroll<H>([&](auto j) ALWAYS_LAMBDA {
        constexpr int at = decltype(j)::value;
        const V a = in(std::integral_constant<int, FIRST + (at + 1) * STRIDE>{});
        const V b = in(std::integral_constant<int, FIRST + (N - 1 - at) * STRIDE>{});
        sum[at] = a + b;
        difference[at] = a - b;
        first = first + sum[at];
      });
      out[0] = {first, V{}};
      unroll<H>([&](auto k) ALWAYS_LAMBDA {
        V re = base, im{};
        unroll<H>([&](auto j) ALWAYS_LAMBDA {
          constexpr int at = (decltype(j)::value + 1) * (decltype(k)::value + 1);
          re = re + sum[j] * Twiddle<N, at>::c;
          im = im - difference[j] * Twiddle<N, at>::s;
        });
        out[k + 1] = {re, im};
      });
    } else {  // 9: the complex transform, half of which is dropped
      C whole[N];
      const auto real = [&](auto i) ALWAYS_LAMBDA { return C{in(i), V{}}; };
      transform<N, false, FIRST, STRIDE>(real, whole);
      unroll<N / 2 + 1>([&](auto k) ALWAYS_LAMBDA { out[k] = whole[k]; });
    }
  }
}

// Computes N times the real line whose transform is in[0 .. N/2], as calls out(first + stride j, value).
template <int N, int FIRST, int STRIDE, class Store>
ALWAYS void restore_real(const C *in, const Store &out) {
  if constexpr (N == 1) {
    out(std::integral_constant<int, FIRST>{}, in[0].re);
  } else if constexpr (N % 2 == 0) {
    constexpr int M = N / 2;
    C even[M / 2 + 1], odd[M / 2 + 1];
    unroll<M / 2 + 1>([&](auto index) ALWAYS_LAMBDA {
      constexpr int k = decltype(index)::value;
      if constexpr (k == 0) {
        even[0] = {in[0].re + in[M].re, V{}};
        odd[0] = {in[0].re - in[M].re, V{}};
      } else if constexpr (2 * k == M) {
        even[k] = {in[k].re + in[k].re, V{}};
        odd[k] = {-(in[k].im + in[k].im), V{}};
      } else {
        even[k] = in[k] + conj(in[M - k]);
        odd[k] = rotate<N, k, true>(in[k] - conj(in[M - k]));
      }
    });
    restore_real<M, FIRST, 2 * STRIDE>(even, out);
    restore_real<M, FIRST + STRIDE, 2 * STRIDE>(odd, out);
  } else {
    constexpr int H = N / 2;
    V first = in[0].re;
    unroll<H>([&](auto k) ALWAYS_LAMBDA { first = first + 2.0f * in[k + 1].re; });
    out(std::integral_constant<int, FIRST>{}, first);
    unroll<H>([&](auto j) ALWAYS_LAMBDA {
      V even = in[0].re, odd{};
      unroll<H>([&](auto k) ALWAYS_LAMBDA {
        constexpr int at = (decltype(j)::value + 1) * (decltype(k)::value + 1);
        even = even + in[k + 1].re * (2 * Twiddle<N, at>::c);
        odd = odd + in[k + 1].im * (2 * Twiddle<N, at>::s);
      });
      out(std::integral_constant<int, FIRST + (decltype(j)::value + 1) * STRIDE>{}, even - odd);
      out(std::integral_constant<int, FIRST + (N - 1 - decltype(j)::value) * STRIDE>{}, even + odd);
    });
  }
}

}  // namespace znnpy

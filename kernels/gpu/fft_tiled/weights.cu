// Conversion of kernel spectra to the form that the product multiplies by.
#include "tile.cuh"

// S   [frequency][map in][slice] float32 complex: transforms of `slice` output maps' kernels, doubled
// most  raised to the largest |S|; total: to the largest sum over maps in of |S|
extern "C" __global__ void weight_bounds(const float2* S, long long frequencies, long long maps_in, long long slice,
                                         float* most, float* total) {
  float largest = 0.0f, heaviest = 0.0f;
  for (long long i = global_thread(); i < frequencies * slice; i += global_threads()) {
    const float2* column = S + i / slice * maps_in * slice + i % slice;
    float sum = 0.0f;
    for (long long map = 0; map < maps_in; map++) {
      const float2 v = column[map * slice];
      const float size = fabsf(v.x) + fabsf(v.y);  // no less than |S|, without overflow
      sum += size;
      largest = larger_magnitude(largest, size);
    }
    heaviest = larger_magnitude(heaviest, sum);
  }
  raise_peak_by_warp(most, largest);
  raise_peak_by_warp(total, heaviest);
}

// W   [word][frequency][2 * padded out][2 * padded in] float16, `word_stride` from word to word: conj(S) * scale as a real
//     matrix, and in word 1 the remainder of float16. Maps `first` .. `first` + count - 1 are written; padding is left
//     unchanged.
extern "C" __global__ void pack_weights(const float2* S, half* W, long long frequencies, long long maps_in, long long slice,
                                        long long first, long long count, long long padded_out, long long padded_in,
                                        long long words, long long word_stride, float scale) {
  const long long all = frequencies * count * maps_in;
  for (long long i = global_thread(); i < all; i += global_threads()) {
    const long long in = i % maps_in, out = i / maps_in % count, frequency = i / (maps_in * count);
    const float2 v = S[(frequency * maps_in + in) * slice + out];
    const float re = scale * v.x, im = -scale * v.y;
    const half2 kept = to_half2(re, im);
    float2 parts[2] = {to_float2(kept), {0.0f, 0.0f}};
    parts[1] = make_float2(re - parts[0].x, im - parts[0].y);
    for (int word = 0; word < words; word++) {
      half2* row = (half2*)(W + word * word_stride + ((frequency * padded_out + first + out) * 2 * padded_in + in) * 2);
      row[0] = to_half2(parts[word].x, -parts[word].y);                  // column 2 out, k = 2 in, 2 in + 1
      row[padded_in] = to_half2(parts[word].y, parts[word].x);           // column 2 out + 1
    }
  }
}

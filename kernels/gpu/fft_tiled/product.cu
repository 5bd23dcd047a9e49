// Y = X W for every frequency: the matrix product of the fused tiled FFT, on tensor cores of sm_80 and newer.
//
// A complex product is a real one of twice the width: [re, im] x [[Wr, Wi], [-Wi, Wr]]. A block keeps the W of one
// frequency, or a slice of its columns, in shared memory and streams the rows of X, one for each tile, past it.
//
// Halves  X and W in float16, sums in float32, Y in float16.
// Split   X and W as two float16 each, x = h + l: h H + l H + h L omits less than 2^-22 of a product. Y in float32.
#include "tile.cuh"

template <class Spectrum>
struct Words;  // number of float16 for a number's real or imaginary part
template <>
struct Words<Halves> {
  static constexpr int COUNT = 1;
};
template <>
struct Words<Split> {
  static constexpr int COUNT = 2;
};

template <class Spectrum, int WARPS_M, int WARPS_N, int MT, int NT, int STAGES, int CHUNK>
struct Product {
  static constexpr int WORDS = Words<Spectrum>::COUNT;
  static constexpr int THREADS = WARP * WARPS_M * WARPS_N;
  static constexpr int BM = WARPS_M * MT * 16, BN = WARPS_N * NT * 8;
  // Rows in shared memory, float16, with 16 bytes of padding, so that 8 rows of a matrix have no bank conflicts.
  static constexpr int A_ROW = (WORDS * CHUNK > BN ? WORDS * CHUNK : BN) + 8, B_ROW = CHUNK + 8;
  // Tensor cores truncate more the larger a sum is, so long products have separate sums for the small terms and for
  // every other k. Up to 96 per chunk, for 96 maps at most, one sum errs by less than 1e-6 and leaves space for more
  // blocks.
  static constexpr int SUMS = WORDS == 2 && CHUNK > 96 ? 3 : 1;

  const half* X;  // rows of this frequency: `row` float16 each
  const half* W;  // [column][k], then the remainders of the first (Split), `word_stride` further
  int rows, columns, depth;  // tiles, 2 * maps out, 2 * maps in
  long long word_stride;
  int chunks;  // chunks of depth; the last one is padded with zeros
  half *a, *b;  // shared: STAGES x BM x A_ROW, WORDS x BN x B_ROW

  DEVICE void load_b(int column0, int c) const {
    constexpr int pieces = CHUNK / 8;
    for (int i = threadIdx.x; i < WORDS * BN * pieces; i += THREADS) {
      const int piece = i % pieces, n = i / pieces % BN, word = i / (pieces * BN);
      const int k = c * CHUNK + piece * 8;
      const bool valid = column0 + n < columns && k < depth;
      const half* from = W + word * word_stride + (valid ? (column0 + n) * depth + k : 0);
      cp_async<16>(b + (word * BN + n) * B_ROW + piece * 8, from, valid);
    }
  }

  DEVICE void load_a(int row0, int c, int stage) const {
    constexpr int pieces = WORDS * CHUNK / 8;
    for (int i = threadIdx.x; i < BM * pieces; i += THREADS) {
      const int piece = i % pieces, m = i / pieces;
      const int k = WORDS * c * CHUNK + piece * 8;
      const bool valid = row0 + m < rows && k < WORDS * depth;
      const half* from = X + (valid ? (unsigned)(row0 + m) * (unsigned)(WORDS * depth) + k : 0);
      cp_async<16>(a + (stage * BM + m) * A_ROW + piece * 8, from, valid);
    }
  }

  DEVICE void multiply(float (&sum)[SUMS][MT][NT][4], int stage) const {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int m0 = warp / WARPS_N * MT * 16, n0 = warp % WARPS_N * NT * 8;
    // Rows of the matrices that this lane addresses.
    const half* a_at = a + (stage * BM + m0 + lane % 16) * A_ROW + lane / 16 * 8 * WORDS;
    const half* b_at = b + (n0 + lane / 16 * 8 + lane % 8) * B_ROW + lane / 8 % 2 * 8;
#pragma unroll 2
    for (int k = 0; k < CHUNK; k += 16) {
      unsigned x[WORDS][MT][4];
#pragma unroll
      for (int word = 0; word < WORDS; word++)
#pragma unroll
        for (int i = 0; i < MT; i++) ldmatrix(x[word][i], a_at + i * 16 * A_ROW + k * WORDS + word * 8);
#pragma unroll
      for (int j = 0; j < NT; j += 2) {
        unsigned w[WORDS][4];
#pragma unroll
        for (int word = 0; word < WORDS; word++) {
          const half* at = b_at + (word * BN + j * 8) * B_ROW + k;
          if (j + 1 < NT) {
            ldmatrix(w[word], at);
          } else {
            unsigned two[2];
            ldmatrix(two, at);
            w[word][0] = two[0];
            w[word][1] = two[1];
          }
        }
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int n = 0; n < 2; n++) {
            if (j + n >= NT) continue;
            if (WORDS == 2) {
              mma_half(sum[SUMS - 1][i][j + n], x[WORDS - 1][i], {w[0][2 * n], w[0][2 * n + 1]});
              mma_half(sum[SUMS - 1][i][j + n], x[0][i], {w[WORDS - 1][2 * n], w[WORDS - 1][2 * n + 1]});
            }
            mma_half(sum[k / 16 % (SUMS > 2 ? 2 : 1)][i][j + n], x[0][i], {w[0][2 * n], w[0][2 * n + 1]});
          }
      }
    }
  }

  // Sums are written through shared memory, in the place of X's rows, so that whole rows are written.
  DEVICE void store(half* Y, const float (&sum)[MT][NT][4], int row0, int column0, float alpha, int stage) const {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int m0 = warp / WARPS_N * MT * 16, n0 = warp % WARPS_N * NT * 8;
    half* tile = a + stage * BM * A_ROW;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          *(half2*)(tile + (m0 + i * 16 + h * 8 + g) * A_ROW + n0 + j * 8 + 2 * t) =
              to_half2(alpha * sum[i][j][2 * h], alpha * sum[i][j][2 * h + 1]);
    sync_block();
    const int pieces = min(BN, columns - column0) / 8;
    for (int i = threadIdx.x; i < BM * pieces; i += THREADS) {
      const int piece = i % pieces, m = i / pieces;
      if (row0 + m < rows)
        *(uint4*)(Y + (long long)(row0 + m) * columns + column0 + piece * 8) = *(const uint4*)(tile + m * A_ROW + piece * 8);
    }
  }

  // float32 pairs are whole sectors by themselves.
  DEVICE void store(float* Y, const float (&sum)[MT][NT][4], int row0, int column0, float alpha, int) const {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int m0 = row0 + warp / WARPS_N * MT * 16, n0 = column0 + warp % WARPS_N * NT * 8;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int m = m0 + i * 16 + h * 8 + g;
#pragma unroll
        for (int j = 0; j < NT; j++) {
          const int n = n0 + j * 8 + 2 * t;
          if (m < rows && n < columns)
            *(float2*)(Y + (long long)m * columns + n) =
                make_float2(alpha * sum[i][j][2 * h], alpha * sum[i][j][2 * h + 1]);
        }
      }
  }

  // Computes all rows, for the columns from `column0`.
  template <class Value>
  DEVICE void run(Value* Y, int column0, float alpha) const {
    const int steps = (rows + BM - 1) / BM * chunks;
    const bool ahead = STAGES > 1 && chunks == 1;  // rows are loaded while the previous ones are multiplied
    float sum[SUMS][MT][NT][4] = {};
    float* const all = sum[0][0][0];
    constexpr int COUNT = MT * NT * 4;
    load_b(column0, 0);
    load_a(0, 0, 0);
    cp_async_commit();
    for (int s = 0; s < steps; s++) {
      const int stage = ahead ? s % STAGES : 0, row0 = s / chunks * BM;
      cp_async_wait<0>();
      sync_block();
      if (ahead && s + 1 < steps) {
        load_a(row0 + BM, 0, (s + 1) % STAGES);
        cp_async_commit();
      }
      multiply(sum, stage);
      sync_block();
      if ((s + 1) % chunks == 0) {
#pragma unroll
        for (int i = COUNT; i < SUMS * COUNT; i++) all[i % COUNT] += all[i];
        store(Y, sum[0], row0, column0, alpha, stage);
#pragma unroll
        for (int i = 0; i < SUMS * COUNT; i++) all[i] = 0.0f;
      }
      if (!ahead && s + 1 < steps) {
        sync_block();
        if (chunks > 1) load_b(column0, (s + 1) % chunks);
        load_a((s + 1) / chunks * BM, (s + 1) % chunks, 0);
        cp_async_commit();
      }
    }
  }
};

// X      [frequency][tile][depth] float16, in pairs of words by 8 (Split); depth = 2 * maps in, padded
// W      [word][frequency][columns][depth] float16; `word_stride` from word to word
// Y      [frequency][tile][columns] float16 (Halves) or float32 (Split), columns = 2 * maps out, padded; times alpha
// Blocks: slices of BN columns, times frequencies. A frequency has fewer than 2^31 numbers.
template <class Spectrum, class Value, int WARPS_M, int WARPS_N, int MT, int NT, int STAGES, int CHUNK, int BLOCKS>
__global__ void __launch_bounds__(WARP* WARPS_M* WARPS_N, BLOCKS)
    product(const half* __restrict__ X, const half* __restrict__ W, Value* __restrict__ Y, long long rows,
            long long columns, long long depth, long long word_stride, float alpha) {
  using P = Product<Spectrum, WARPS_M, WARPS_N, MT, NT, STAGES, CHUNK>;
  EXTERN_SHARED(half, shared);
  const int slices = int((columns + P::BN - 1) / P::BN), slice = blockIdx.x % slices;
  const long long frequency = blockIdx.x / slices;
  const P p = {X + frequency * rows * depth * P::WORDS,
               W + frequency * columns * depth,
               int(rows),
               int(columns),
               int(depth),
               word_stride,
               int((depth + CHUNK - 1) / CHUNK),
               shared,
               shared + STAGES * P::BM * P::A_ROW};
  p.run(Y + frequency * rows * columns, slice * P::BN, alpha);
}

/* Small kernels that use every operation of device_ops.cuh and activation.cuh once, and divisions, for test_device_ops.py. */
#include "activation.cuh"
#include "implicit_gemm/operands.cuh"

extern "C" __global__ void add_one(float* values, long long count) {
    const long long i = global_thread();
    if (i < count) values[i] += 1.0f;
}

extern "C" __global__ void every_argument(
    const float* in, float* out, long long whole, float real, int narrow, const float* null) {
    if (threadIdx.x == 0 && NAN != NAN && -INFINITY < real) out[0] = in[0] + (float)whole + real + (float)narrow + (null == nullptr ? 1000.0f : 0.0f);
}

struct Mixed {
    long long whole;
    int narrow[3];
    float real;
};

/* Values of a struct that is passed by value, chosen at run time too. */
extern "C" __global__ void of_struct(const __grid_constant__ Mixed given, float* out) {
    out[threadIdx.x] = (float)given.whole + (float)given.narrow[threadIdx.x % 3] + given.real;
}

/* The place of each thread in a grid of three dimensions, as the decimal digits of one number. */
extern "C" __global__ void places(float* out) {
    const dim3 b = blockDim, g = gridDim;
    const long long block = ((long long)blockIdx.z * g.y + blockIdx.y) * g.x + blockIdx.x;
    const long long thread = (threadIdx.z * b.y + threadIdx.y) * b.x + threadIdx.x;
    out[block * b.x * b.y * b.z + thread] = (float)(threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z + 1000 * blockIdx.x +
                                                    10000 * blockIdx.y + 100000 * blockIdx.z);
}

/* out[x][y] = in[y][x], by way of shared memory; blocks of SIZE x SIZE. */
template <int SIZE> __global__ void transpose(const float* in, float* out) {
    SHARED(float, tile, [SIZE][SIZE + 1]);
    tile[threadIdx.y][threadIdx.x] = in[threadIdx.y * SIZE + threadIdx.x];
    sync_block();
    out[threadIdx.y * SIZE + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}

/* Sum of all values of a block, in dynamic shared memory; one output a block. BARRIERS 0: the fault. */
template <int BARRIERS> __global__ void sum_of_block(const float* in, float* out) {
    EXTERN_SHARED(float, part);
    part[threadIdx.x] = in[(long long)blockIdx.x * blockDim.x + threadIdx.x];
    for (int half_way = blockDim.x / 2; half_way > 0; half_way /= 2) {
        if (BARRIERS) sync_block();
        if (threadIdx.x < half_way) part[threadIdx.x] += part[threadIdx.x + half_way];
    }
    if (BARRIERS) sync_block();
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}

/* Shared memory as it is when a block starts: of each block `count` floats of the dynamic, then as many of the fixed one.
 * BEYOND: writes behind it.
 */
template <int BEYOND> __global__ void untouched(float* out, long long count) {
    EXTERN_SHARED(float, part);
    SHARED(float, fixed, [64]);
    if (BEYOND) part[count] = 1.0f;
    float* const mine = out + 2 * count * blockIdx.x;
    mine[threadIdx.x] = part[threadIdx.x];
    mine[count + threadIdx.x] = fixed[threadIdx.x];
    part[threadIdx.x] = fixed[threadIdx.x] = 0.0f;
}

extern "C" __global__ void half_a_barrier(float* out) {
    if (threadIdx.x < 16) sync_block();
    else shuffle(1.0f, 0);
    out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void shuffles(const float* in, float* out) {
    const float value = in[threadIdx.x];
    const int lane = threadIdx.x % WARP;
    float* row = out + 5 * threadIdx.x;
    row[0] = shuffle(value, 5);
    row[1] = shuffle_xor(value, 7);
    row[2] = shuffle_down(value, 3);
    row[3] = shuffle_up(value, 4);
    row[4] = (float)shuffle((long long)lane << 33, (lane + 1) % WARP);
}

extern "C" __global__ void to_halves(const float* in, half* out, float* back, long long count) {
    const long long i = global_thread();
    if (i >= count) return;
    out[i] = to_half(in[i]);
    back[i] = to_float(out[i]);
}

template <class T> __global__ void wide(const T* in, T* out, long long count) {  // out = in + 1, in three widths
    const long long i = 7 * global_thread();
    if (i + 7 > count) return;
    // 4-wide and 2-wide accesses want their own multiples, so they read what begins at 8 * thread
    const T* from = in + 8 * global_thread();
    T* to = out + 8 * global_thread();
    float4 four = load_activation4(from);
    float2 two = load_activation2(from + 4);
    store_activation4(to, make_float4(four.x + 1, four.y + 1, four.z + 1, four.w + 1));
    store_activation2(to + 4, make_float2(two.x + 1, two.y + 1));
    store_activation(to + 6, load_activation(from + 6) + 1);
}

extern "C" __global__ void peaks(const float* in, float* peak, float* peak_by_warp, long long count) {
    const long long i = global_thread();
    const float value = i < count ? in[i] : 0.0f;
    raise_peak(peak, value);
    raise_peak_by_warp(peak_by_warp, value);
    raise_peak(nullptr, value);
}

extern "C" __global__ void tf32_of(const float* in, float* out) { out[threadIdx.x] = from_bits(to_tf32(in[threadIdx.x])); }

/* d (16, 8) float32 += a (16, 16) float16, row by row, times b (16, 8) float16, row by row: 32 threads. */
extern "C" __global__ void product_half(const half* a, const half* b, float* d) {
    SHARED(half, left, [16][24]);   // 48 bytes a row: on 16
    SHARED(half, right, [16][8]);
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 256; i += WARP) left[i / 16][i % 16] = a[i];
    cp_async<8>(&right[lane / 2][4 * (lane % 2)], b + 4 * lane);
    cp_async_commit();
    cp_async_wait<0>();
    sync_warp();
    unsigned words[4], others[2];
    ldmatrix(words, &left[lane % 16][lane / 16 * 8]);
    ldmatrix_transposed(others, &right[lane % 16][0]);
    float sums[4] = {d[8 * g + 2 * t], d[8 * g + 2 * t + 1], d[8 * (g + 8) + 2 * t], d[8 * (g + 8) + 2 * t + 1]};
    mma_half(sums, words, others);
    for (int i = 0; i < 4; ++i) d[8 * (g + i / 2 * 8) + 2 * t + i % 2] = sums[i];
}

/* The words each lane gets of four matrices in[i][row][column] of 16 bits, as they are and transposed; then of two. */
extern "C" __global__ void matrices(const half* in, unsigned* out) {
    SHARED(half, part, [4][8][8]);
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += WARP) part[i / 64][i / 8 % 8][i % 8] = in[i];
    sync_warp();
    unsigned four[4], turned[4], two[2], two_turned[2];
    ldmatrix(four, part[lane / 8][lane % 8]);
    ldmatrix_transposed(turned, part[lane / 8][lane % 8]);
    ldmatrix(two, part[lane / 8 % 2][lane % 8]);
    ldmatrix_transposed(two_turned, part[lane / 8 % 2][lane % 8]);
    unsigned* const mine = out + 12 * lane;
    for (int i = 0; i < 4; ++i) mine[i] = four[i], mine[4 + i] = turned[i];
    for (int i = 0; i < 2; ++i) mine[8 + i] = two[i], mine[10 + i] = two_turned[i];
}

/* d (16, 8) = a (16, 8) times b (8, 8), in tf32. */
extern "C" __global__ void product_tf32(const float* a, const float* b, float* d) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    const unsigned words[4] = {to_tf32(a[8 * g + t]), to_tf32(a[8 * (g + 8) + t]), to_tf32(a[8 * g + t + 4]),
                               to_tf32(a[8 * (g + 8) + t + 4])};
    const unsigned others[2] = {to_tf32(b[8 * t + g]), to_tf32(b[8 * (t + 4) + g])};
    float sums[4] = {0, 0, 0, 0};
    mma_tf32(sums, words, others);
    for (int i = 0; i < 4; ++i) d[8 * (g + i / 2 * 8) + 2 * t + i % 2] = sums[i];
}

/* out[i] = in[i], three groups of copies deep; where `from` is not below `count` zeros. WAIT: groups that may be open. */
template <int WAIT> __global__ void copies(const float* in, float* out, long long count) {
    SHARED(float, part, [3][128]);
    const int lane = threadIdx.x;
    for (int group = 0; group < 3; ++group) {
        const long long from = 128 * group + 4 * lane;
        cp_async<16>(&part[group][4 * lane], in + from, from < count);
        cp_async_commit();
    }
    cp_async_wait<2>();
    sync_warp();
    for (int i = lane; i < 128; i += WARP) out[i] = part[0][i];
    cp_async_wait<WAIT>();
    sync_warp();
    for (int i = lane; i < 256; i += WARP) out[128 + i] = part[1 + i / 128][i % 128];
}

extern "C" __global__ void activations(const float* in, float* out, long long count) {
    const long long i = global_thread();
    if (i >= count) return;
    out[i] = activate<NONE>(in[i]);
    out[count + i] = activate<RELU>(in[i]);
    out[2 * count + i] = activate<TANH>(in[i]);
    out[3 * count + i] = activate(in[i], SIGMOID);
}

extern "C" __global__ void times(const float* in, float* out, float factor) {
    out[threadIdx.x] = in[threadIdx.x] * factor;
}

extern "C" __global__ void quotients(const int* n, const int* d, int* out, long long count) {
    const long long i = global_thread();
    if (i < count) out[i] = divided(n[i], d[i], 1.0f / d[i]);
    if (i < count) out[count + i] = quotient(n[i] % (1 << 20), 1.0f / d[i]);
}

extern "C" __global__ void beyond(float* values, long long at) { values[at] = 1.0f; }

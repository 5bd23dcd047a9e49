/* Kernels that apply every function of functions.cuh, for test_functions.py. */
#include "graph/functions.cuh"

extern "C" __global__ void one_by_one(const float* in, float* out, long long count, long long function, float a, float b) {
    const long long i = global_thread();
    if (i < count) out[i] = apply_function(in[i], (int)function, a, b);
}

/* A thread has four neighbours; `count` is a multiple of four. */
extern "C" __global__ void four_at_once(const float* in, float* out, long long count, long long function, float a, float b) {
    const long long i = 4 * global_thread();
    if (i >= count) return;
    float values[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = in[i + j];
    apply_functions(values, (int)function, a, b);
#pragma unroll
    for (int j = 0; j < 4; ++j) out[i + j] = values[j];
}

/* Softmax over `count` values, which are joined in groups of four, and these in two halves. */
extern "C" __global__ void softmax(const float* in, float* out, long long count) {
    Softmax halves[2] = {no_maps(), no_maps()};
    for (int group = 0; 4 * group < count; ++group) {
        float values[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] = in[min(4 * group + j, (int)count - 1)];
        halves[group % 2] = joined(halves[group % 2], values, (int)count - 4 * group);
    }
    const Softmax all = joined(halves[0], halves[1]);
    for (int i = 0; i < count; ++i) out[i] = of_all(all, in[i]);
}

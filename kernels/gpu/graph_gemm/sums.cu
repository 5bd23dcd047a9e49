/* The parts of sums of convolutions added, with what follows them.
 *
 * Computes   out[i, g] = function(bias[g] + addend[i, g] + sum over p of sums[p, i, g])
 * Shapes     sums (parts, voxels, f') float; out and addend (z, y, x, f') half, each with its own strides
 * Method     A thread takes COUNT maps of a voxel; parts are added in order.
 * Bound      memory
 * Tested     tests/kernels/gpu/graph_gemm/test_primitive.py
 */
#include "graph/functions.cuh"

template <int COUNT>
__global__ void __launch_bounds__(256)
    add_parts(const float* sums, const float* bias, const half* addend, long long addend_z, long long addend_y,
              long long addend_x, half* out, long long out_z, long long out_y, long long out_x, float* out_peak, long long parts, long long mz, long long my, long long mx,
              long long fout, long long function, float a, float b) {
    const long long all = mz * my * mx * fout, at = COUNT * global_thread();
    float largest = 0.0f;
    if (at < all) {
        const long long voxel = at / fout;
        const int map = (int)(at - voxel * fout);
        const long long x = voxel % mx, y = voxel / mx % my, z = voxel / mx / my;
        half* const to = out + z * out_z + y * out_y + x * out_x + map;
        float values[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = bias[map + i];
        for (int part = 0; part < (int)parts; ++part) {
            if constexpr (COUNT == 4) {
                const float4 more = __ldg(reinterpret_cast<const float4*>(sums + part * all + at));
                values[0] += more.x, values[1] += more.y, values[2] += more.z, values[3] += more.w;
            } else {
                values[0] += __ldg(sums + part * all + at);
            }
        }
        if (addend != nullptr) {
            const half* const from = addend + z * addend_z + y * addend_y + x * addend_x + map;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) values[i] += to_float(__ldg(from + i));
        }
        apply_functions(values, (int)function, a, b);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) largest = larger_magnitude(largest, values[i]);
        if constexpr (COUNT == 4)
            store_activation4(to, make_float4(values[0], values[1], values[2], values[3]));
        else
            store_activation(to, values[0]);
    }
    raise_peak_by_warp(out_peak, largest);
}

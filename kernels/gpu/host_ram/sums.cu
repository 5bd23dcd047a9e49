/* Sums over groups of input maps: adds the result of one sub-layer; the last one applies the epilogue.
 *
 * Computes   total[i] = (first ? 0 : total[i]) + part[i]; with `last`
 *            out[i] = activation(total[i] + bias[i % fout]) instead, and *peak is raised to the largest |out| or, if a
 *            sum is infinite or not a number, to it: an activation might hide that. total and out may be one array.
 * Launch     blocks of 256 threads with grid-stride loops.
 * Bound      memory: reads two values and writes one.
 * Source     first principles.
 * Tested     tests/kernels/gpu/host_ram/test_primitive.py
 */
#include "device_ops.cuh"
#include "activation.cuh"

constexpr unsigned INFINITE = 0x7f800000u;  // bits of infinity; those of NaN are above

template <class T>
__global__ void add_part(const T* part, float* total, T* out, const float* bias, long long count, long long fout,
                         long long first, long long last, long long activation, float* peak) {
    float largest = 0.0f;
    for (long long i = global_thread(); i < count; i += global_threads()) {
        const float sum = to_float(part[i]) + (first ? 0.0f : total[i]);
        if (!last) {
            total[i] = sum;
            continue;
        }
        const float biased = sum + bias[i % fout], value = activate(biased, (int)activation);
        largest = larger_magnitude(largest, magnitude_bits(biased) < INFINITE ? value : biased);
        store_activation(out + i, value);
    }
    raise_peak_by_warp(peak, largest);
}

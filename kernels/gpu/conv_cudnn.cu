/* Epilogue for convolutions of cuDNN plans that cannot fuse bias and activation: both, in place.
 *
 * Computes   out[i] = activation(out[i] + bias[i % fout]), for images of `size` values, `step` values from one to the
 *            next. The largest finite value that was in out counts as infinite.
 * Launch     blocks of 256 threads, one value each along x of the grid, images along y of it.
 * Bound      memory: reads and writes every value once.
 * Source     first principles.
 * Tested     tests/kernels/gpu/test_conv_cudnn.py
 */
#include "device_ops.cuh"
#include "activation.cuh"

template <class T>
__global__ void finish(T* out, const float* bias, long long images, long long size, long long step, long long fout,
                       long long activation) {
    for (long long s = blockIdx.y; s < images; s += gridDim.y) {
        T* const image = out + s * step;
        for (long long i = global_thread(); i < size; i += global_threads())
            store_activation(image + i, activate(not_clamped<T>(to_float(image[i])) + bias[i % fout], (int)activation));
    }
}

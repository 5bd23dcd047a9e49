/* Long sums in parts: when n terms are added in sequence, the error grows with the square root of n.
 *
 * Partial sums are in local memory, since registers hold the current ones; volatile keeps the compiler from merging
 * them.
 *
 * Tested  tests/kernels/gpu/implicit_gemm/test_primitive.py
 */
#pragma once

#include "device_ops.cuh"

template <int COUNT> struct PartialSums {
    volatile float sums[COUNT];

    /* Adds the terms to the partial sums (`first`: initialises these) and clears the terms. */
    DEVICE void flush(float* terms, bool first) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            sums[i] = first ? terms[i] : sums[i] + terms[i];
            terms[i] = 0.0f;
        }
    }
    DEVICE void add_to(float* terms) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) terms[i] += sums[i];
    }
};

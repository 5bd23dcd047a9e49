/* Sums of many terms, put by from time to time: where n are added up one after another, the error grows with n's root.
 *
 * What is put by lies in local memory, since registers hold the sums; volatile, or the compiler would take them for it.
 *
 * Tested  tests/kernels/gpu/test_implicit_gemm.py
 */
#pragma once

#include "device_ops.cuh"

template <int COUNT> struct Kept {
    volatile float sums[COUNT];

    /* The first time, and later on. */
    DEVICE void put_by(float* terms, bool first) {
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

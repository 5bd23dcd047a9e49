/* A convolution or transposed convolution of a graph as a kernel takes it: by value, as products.py lays it out.
 *
 * Of the transposed, m are places, and -before is the first of them.
 *
 * Tested  tests/kernels/gpu/graph/test_conv.py
 */
#pragma once

#include "graph/inputs.cuh"

struct Problem {
    Triple n, m, k, before, stride, dilation, first;
    int inputs, fin, fout, groups;  // fin and fout: maps of a group
    int pitch, wide;                // values from row to row of the weights; whether four of them are read at once
    Triple out, shift;              // of a transposed convolution: its size; place 0 of phase 0 in it
    int channels;                   // and its maps
    int function;
    float a, b;
};

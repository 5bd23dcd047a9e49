/* A convolution of a graph as a kernel takes it: by value, as conv.py lays it out.
 *
 * Tested  tests/kernels/gpu/graph/test_primitives.py
 */
#pragma once

#include "graph/inputs.cuh"

struct Problem {
    Triple n, m, k, before, stride, dilation, first;
    int inputs, fin, fout, groups;  // fin and fout: maps of a group
    int pitch, wide;                // values from row to row of the weights; whether four of them are read at once
    int function;
    float a, b;
};

// Arguments that graph_point_lanes.py passes to layers that take their inputs voxel by voxel. Sizes are in elements.
#pragma once
#include <cstdint>

enum { MOST_INPUTS = 8 };
enum { ADD, MULTIPLY, CONCAT, SCALE, FUNCTION_ALONE };

struct PointInput {
  const void *x;
  int64_t f;
  int64_t z, y, voxel;  // values from plane to plane, line to line, voxel to voxel
};

struct Point {
  int64_t n[3];  // z, y, x
  int64_t f;     // maps of the output
  int64_t how;
  int64_t inputs;
  int64_t function;  // as in activations.hpp
  double a, b;       // parameters of the function
  int64_t slopes;    // of a prelu: 1 or f
  int64_t past;      // whether the output is written past the caches
  int64_t bf16;      // whether inputs and output are bfloat16, else float
  const float *weight, *bias;  // factors and offsets of a scale, or slopes
  void *out;
  PointInput from[MOST_INPUTS];
};

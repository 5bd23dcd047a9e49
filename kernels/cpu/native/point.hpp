// Arguments that graph_point_lanes.py passes to layers that take their inputs voxel by voxel. Sizes are in elements.
#pragma once
#include <cstdint>

enum { MOST_INPUTS = 8 };
enum { ADD, MULTIPLY, CONCAT, SCALE, FUNCTION_ALONE };

struct PointInput {
  const float *x;
  int64_t f;
  int64_t z, y, voxel;  // floats from plane to plane, line to line, voxel to voxel
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
  const float *weight, *bias;  // factors and offsets of a scale, or slopes
  float *out;
  PointInput from[MOST_INPUTS];
};

// What conv_fft_lanes.py tells the tiled convolution. Sizes are in elements; the last axis of an image is its channels.
#pragma once
#include <cstdint>

struct Tiling {
  int64_t n[3], k[3], tile[3];  // input, kernel, tile: z, y, x
  int64_t step[3];              // outputs of a whole tile: tile - k + 1
  int64_t counts[3];            // tiles of an image along each axis
  int64_t fin, fout;
  int64_t first, tiles;   // of the group
  int64_t chunk;          // tiles whose columns are multiplied at once
  int64_t column_pitch;   // floats from column to column of the spectra
  int64_t tile_pitch;     // floats from tile to tile of a column
  int64_t x_image, out_image;  // floats from image to image
  int64_t relu, kept, stream;
  const float *x;
  float *out;
  float *spectra;
  const float *kernels;  // kept: spectra, column by column; else transformed along x alone
  const float *bias;     // in whole blocks
};

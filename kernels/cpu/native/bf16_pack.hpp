// Packs planes of the input as the unit reads them: bfloat16, or values divided into words of bfloat16, with zeros
// around the arrays and behind the last map.
#pragma once
#include "bf16_conv.hpp"
#include "bf16_unit.hpp"
#include "rows.hpp"

namespace znnpy {

struct Words {  // where the words of some values go
  char *at;
  ptrdiff_t word;  // bytes from word to word
  int count;
};

// Divides values into words: each is what the words before it leave, rounded.
ALWAYS void put_words(const Words &to, ptrdiff_t value, V v) {
  for (int word = 0; word < to.count; word++) {
    Bf16 *const at = reinterpret_cast<Bf16 *>(to.at + word * to.word) + value;
    store(at, v);
    v -= load(at);
  }
}

ALWAYS void put_word_parts(const Words &to, ptrdiff_t value, V v, int count) {
  for (int word = 0; word < to.count; word++) {
    Bf16 *const at = reinterpret_cast<Bf16 *>(to.at + word * to.word) + value;
    store_part(at, v, count);
    v -= load_part(at, count);
  }
}

// Packs the maps of one voxel.
ALWAYS void pack_values(const float *x, ptrdiff_t maps, const Words &to) {
  ptrdiff_t i = 0;
  for (; i + W <= maps; i += W) put_words(to, i, load(x + i));
  if (i < maps) put_word_parts(to, i, load_part(x + i, (int)(maps - i)), (int)(maps - i));
}
ALWAYS void pack_values(const Bf16 *x, ptrdiff_t maps, const Words &to) {
  Bf16 *const at = reinterpret_cast<Bf16 *>(to.at);
  ptrdiff_t i = 0;
  for (; i + 32 <= maps; i += 32) std::memcpy(at + i, x + i, 64);
  for (; i + 8 <= maps; i += 8) std::memcpy(at + i, x + i, 16);
  for (; i < maps; i++) at[i] = x[i];
}

struct Unit {  // some places of one image that a thread computes
  ptrdiff_t image, first[3], count[3];
};

struct Layout {  // of a packed plane, in bytes
  ptrdiff_t voxel, row, word, step, lattice;

  Layout(const Bf16Conv &c, const Bf16Group &g)
      : voxel(c.fold ? 2 * g.fin : 2 * STEP),
        row(c.pitch * voxel * (c.fold ? c.words : 1)),
        word(c.fold ? c.pitch * voxel : g.sides[0] * g.sides[1] * g.height * row),
        step(c.words * word),
        lattice(g.height * row) {}
};

struct Line {  // some neighbouring voxels of the input along x
  ptrdiff_t z, y, x;  // where they begin, in the arrays; x may lie before them
  ptrdiff_t count, stride, stride_y;  // stride_y: from line to line
  ptrdiff_t lo, hi;  // those that lie in the arrays
};

// Packs `count` maps of one array, from map `first` on. Where voxels are skipped the next line is prefetched, since
// processors foresee only lines of memory that follow each other.
template <class T>
void pack_maps(const Bf16Conv &c, const Bf16Input &in, const T *row, const Line &line, ptrdiff_t first, ptrdiff_t count,
               const Layout &l, char *to) {
  const ptrdiff_t factor = in.factor[2], shift = in.first[2];
  if (sizeof(T) == 2 && factor == 1 && line.stride * in.voxel * 2 == l.voxel && 2 * count == l.voxel) {
    std::memcpy(to + line.lo * l.voxel, row + (line.x + line.lo) * in.voxel + first, (line.hi - line.lo) * l.voxel);
    return;
  }
  for (ptrdiff_t i = line.lo; i < line.hi; i++) {
    const ptrdiff_t x = line.x + i * line.stride, there = factor == 1 ? x : (x + shift) / factor;
    if (line.stride > 1) __builtin_prefetch(row + line.stride_y * in.row + there * in.voxel + first);
    pack_values(row + there * in.voxel + first, count, {to + i * l.voxel, l.word, (int)c.words});
  }
}

// Writes zeros for voxels [lo, hi) of a packed line, from value `first` of each on up to value `last`.
ALWAYS void pack_zeros(const Bf16Conv &c, const Layout &l, char *to, ptrdiff_t lo, ptrdiff_t hi, ptrdiff_t first,
                       ptrdiff_t last) {
  for (int word = 0; word < c.words && first < last; word++)
    for (ptrdiff_t i = lo; i < hi; i++)
      std::memset(to + word * l.word + i * l.voxel + 2 * first, 0, 2 * (last - first));
}

// Packs a line of voxels that lie in the arrays along z and y.
template <class T>
void pack_line(const Bf16Conv &c, const Bf16Group &g, const Unit &u, const Line &line, const Layout &l, char *to) {
  ptrdiff_t map = 0;
  for (ptrdiff_t number = 0; number < g.inputs; number++) {
    const Bf16Input &in = g.from[number];
    const ptrdiff_t z = in.factor[0] == 1 ? line.z : (line.z + in.first[0]) / in.factor[0];
    const ptrdiff_t y = in.factor[1] == 1 ? line.y : (line.y + in.first[1]) / in.factor[1];
    const T *const row = static_cast<const T *>(in.x) + u.image * in.image + z * in.plane + y * in.row;
    for (ptrdiff_t first = 0; first < in.maps;) {  // parts of steps
      const ptrdiff_t within = c.fold ? map : map % STEP, space = c.fold ? in.maps : STEP - within;
      const ptrdiff_t count = least(space, in.maps - first);
      char *const at = to + (c.fold ? 0 : map / STEP * l.step) + 2 * within;
      pack_maps(c, in, row, line, first, count, l, at);
      first += count;
      map += count;
    }
  }
  if (!c.fold && map % STEP) pack_zeros(c, l, to + map / STEP * l.step, line.lo, line.hi, map % STEP, STEP);
}

// Packs plane `z` of the input, counted with its padding, for the places of a unit.
template <class T>
void pack_plane(const Bf16Conv &c, const Bf16Group &g, const Unit &u, ptrdiff_t z, char *slot) {
  const Layout l(c, g);
  const ptrdiff_t there = z - g.lead[0], sy = c.fold ? 1 : g.stride[1], sx = c.fold ? 1 : g.stride[2];
  const ptrdiff_t most_y = c.unit[1] + c.pool[1] - 1, most_x = c.unit[2] + c.pool[2] - 1;
  const ptrdiff_t extra_y = g.height - (c.fold ? (most_y - 1) * g.stride[1] + 1 : most_y);
  const ptrdiff_t extra_x = c.pitch - (c.fold ? (most_x - 1) * g.stride[2] + 1 : most_x);
  const ptrdiff_t rows = (c.fold ? (u.count[1] - 1) * g.stride[1] + 1 : u.count[1]) + extra_y;
  const ptrdiff_t columns = (c.fold ? (u.count[2] - 1) * g.stride[2] + 1 : u.count[2]) + extra_x;
  const ptrdiff_t steps = c.fold ? 1 : g.steps, values = c.fold ? g.fin : STEP;
  for (ptrdiff_t side_y = 0; side_y < g.sides[0]; side_y++) {
    for (ptrdiff_t r = 0; r < rows; r++) {
      const ptrdiff_t y = u.first[1] * g.stride[1] + r * sy + g.side[0][side_y] - g.lead[1];
      const bool held = there >= 0 && there < g.held[0] && y >= 0 && y < g.held[1];
      for (ptrdiff_t side_x = 0; side_x < g.sides[1]; side_x++) {  // in turn, since they lie in the same memory
        char *const to = slot + (side_y * g.sides[1] + side_x) * l.lattice + r * l.row;
        const ptrdiff_t x = u.first[2] * g.stride[2] + g.side[1][side_x] - g.lead[2];
        const ptrdiff_t lo = x < 0 ? least(columns, (-x + sx - 1) / sx) : 0;
        const ptrdiff_t hi = most(lo, least(columns, (g.held[2] - x + sx - 1) / sx));
        if (held) pack_line<T>(c, g, u, {there, y, x, columns, sx, sy, lo, hi}, l, to);
        for (ptrdiff_t step = 0; step < steps; step++) {
          pack_zeros(c, l, to + step * l.step, 0, held ? lo : columns, 0, values);
          if (held) pack_zeros(c, l, to + step * l.step, hi, columns, 0, values);
        }
      }
    }
  }
}

// Copies one piece of each place of a line: `bytes` bytes, and up to SIZE - 1 more behind them.
template <int SIZE>
ALWAYS void copy_pieces(const char *from, ptrdiff_t next, char *to, ptrdiff_t voxel, ptrdiff_t places, ptrdiff_t bytes) {
  for (ptrdiff_t i = 0; i < places; i++, from += next, to += voxel)
    for (ptrdiff_t at = 0; at < bytes; at += SIZE) std::memcpy(to + at, from + at, SIZE);
}

// Gathers the inputs of all taps of the places of a plane, place by place: (word, z, y, x, map), with zeros behind. Line
// by line each row of the kernel is copied for all places; what is written too much is written over by the next row.
template <int SIZE>
void gather_taps(const Bf16Conv &c, const Bf16Group &g, const Unit &u, const char *const *planes, char *to) {
  const ptrdiff_t line = 2 * c.pitch * g.fin, piece = 2 * c.window[2] * g.fin, word = 2 * g.steps * STEP;
  const ptrdiff_t voxel = c.words * word, next = 2 * g.stride[2] * g.fin, rows = c.window[0] * c.window[1];
  for (ptrdiff_t r = 0; r < u.count[1]; r++) {
    for (int w = 0; w < c.words; w++) {
      char *const first = to + r * u.count[2] * voxel + w * word;
      for (ptrdiff_t number = 0; number < rows; number++) {
        const ptrdiff_t z = number / c.window[1], y = number % c.window[1];
        const char *const from = planes[z] + ((r * g.stride[1] + y * c.dilation_y) * c.words + w) * line;
        char *const at = first + number * piece;
        if (number * piece + (piece + SIZE - 1) / SIZE * SIZE <= word)
          copy_pieces<SIZE>(from, next, at, voxel, u.count[2], piece);
        else copy_pieces<2>(from, next, at, voxel, u.count[2], piece);  // no byte more
      }
      for (ptrdiff_t i = 0; i < u.count[2]; i++) {
        char *const place = first + i * voxel;
        ptrdiff_t zero = rows * piece;
        for (; zero % 16; zero += 2) std::memset(place + zero, 0, 2);
        for (; zero < word; zero += 16) std::memset(place + zero, 0, 16);
      }
    }
  }
}

ALWAYS void gather(const Bf16Conv &c, const Unit &u, const char *const *planes, char *to) {
  const Bf16Group &g = c.group[0];
  const ptrdiff_t piece = 2 * c.window[2] * g.fin;
  if (piece <= 8) gather_taps<8>(c, g, u, planes, to);
  else if (piece <= 16) gather_taps<16>(c, g, u, planes, to);
  else gather_taps<32>(c, g, u, planes, to);
}

}  // namespace znnpy

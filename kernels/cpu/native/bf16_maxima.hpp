// Maxima over the windows of a plane of outputs, and their way into fragments: see pool.hpp for what fragments are.
#pragma once
#include "bf16.hpp"
#include "rows.hpp"

namespace znnpy {

struct Position {
  ptrdiff_t z, y, x;
};

struct Pitches {  // values from image to image, plane to plane, row to row
  ptrdiff_t image, plane, row;
};

// Writes the first `left` lanes, all of them if more; whole vectors may go past the caches.
template <class T>
ALWAYS void put_lanes(T *out, V v, ptrdiff_t left, bool past) {
  if (left < W) store_part(out, v, (int)left);
  else if (past) stream(out, v);
  else store(out, v);
}

struct Maxima {
  ptrdiff_t maps, rows, columns;  // rows, columns: of windows
  ptrdiff_t run;                  // voxels of a row of outputs
  ptrdiff_t pz, py, px;

  ptrdiff_t line() const { return run * maps; }
  ptrdiff_t plane() const { return rows * columns * maps; }

  // Writes the maxima over y and x of all windows.
  template <class T>
  void of_plane(const T *outputs, T *to) const {
    for (ptrdiff_t row = 0; row < rows; row++) {
      for (ptrdiff_t column = 0; column < columns; column++, to += maps) {
        const T *const first = outputs + row * line() + column * maps;
        for (ptrdiff_t map = 0; map < maps; map += W) {
          V v = load_part(first + map, (int)least(W, maps - map));
          for (ptrdiff_t y = 0; y < py; y++)
            for (ptrdiff_t x = y == 0 ? 1 : 0; x < px; x++)
              v = larger(v, load_part(first + y * line() + x * maps + map, (int)least(W, maps - map)));
          put_lanes(to + map, v, maps - map, false);
        }
      }
    }
  }

  // Writes the maxima over pz planes into the fragments of one image; `at` is the position of the first window.
  template <class T>
  void scatter(const T *planes, T *out, const Position &at, const Pitches &to, bool past) const {
    for (ptrdiff_t row = 0; row < rows; row++) {
      const ptrdiff_t y = at.y + row, fragment = (at.z % pz * py + y % py) * px;
      T *const there = out + at.z / pz * to.plane + y / py * to.row;
      for (ptrdiff_t column = 0; column < columns; column++) {
        const ptrdiff_t x = at.x + column;
        T *const target = there + (fragment + x % px) * to.image + x / px * maps;
        const T *const first = planes + (row * columns + column) * maps;
        for (ptrdiff_t map = 0; map < maps; map += W) {
          V v = load_part(first + map, (int)least(W, maps - map));
          for (ptrdiff_t z = 1; z < pz; z++)
            v = larger(v, load_part(first + z * plane() + map, (int)least(W, maps - map)));
          put_lanes(target + map, v, maps - map, past);
        }
      }
    }
  }
};

}  // namespace znnpy

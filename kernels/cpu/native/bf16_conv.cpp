// Direct convolution on the unit for bfloat16, as a matrix product whose left factor is never written to memory: places
// by maps, times maps by maps, for every tap. See bf16_conv.py, which owns the memory and divides the work.
//
// A thread takes some rows and columns of places and follows them along z. It packs each plane of the input once, into
// a ring of planes in L2. Of every plane of places it computes two panels of maps at a time, block by block, and ends
// each block while it is in L1.
#include "activations.hpp"
#include "bf16_block.hpp"
#include "bf16_maxima.hpp"
#include "bf16_pack.hpp"

namespace znnpy {
namespace {

constexpr ptrdiff_t MOST_PLANES = 64;  // as in bf16_division.py

struct Run {  // neighbouring places of a block whose outputs are wanted
  float *sums;  // WIDTH floats from one to the next
  float *ended;  // where results go besides the output, WIDTH floats from one to the next; null: nowhere
  ptrdiff_t places;
  int64_t out;      // the value of the output where the first begins
  int64_t addend;   // the same of the addend
  ptrdiff_t lanes;  // maps that there are of these panels
};

// Ends the sums of some places: addend, function, rounding. Returns how many of the sums are not finite.
template <int FUNCTION, class T>
int64_t end_run(const Bf16Conv &c, const Run &r) {
  const V a = broadcast((float)c.a), b = broadcast((float)c.b);
  const ptrdiff_t out_voxel = c.step[2] * c.fout, whole = r.lanes / W * W;
  const int left = (int)(r.lanes - whole);
  const T *const addend = c.addend == nullptr ? nullptr : static_cast<const T *>(c.addend) + r.addend;
  T *const out = static_cast<T *>(c.out) + r.out;
  V finite{};  // stays zero while all values are finite
  for (ptrdiff_t i = 0; i < r.places; i++) {
    float *const sums = r.sums + i * WIDTH;
    const T *const more = addend + i * c.step[2] * c.add_voxel;
    for (ptrdiff_t lane = 0; lane < r.lanes; lane += W) {
      const int count = lane < whole ? W : left;
      V x = load(sums + lane);
      if (addend) {
        x += load_part(more + lane, count);
        store(sums + lane, x);
      }
      finite += x * 0.0f;  // kernels behind the last map are zero
      const V result = apply<FUNCTION>(x, a, b);
      put_lanes(out + i * out_voxel + lane, result, count, c.past);
      if (r.ended) store(r.ended + i * WIDTH + lane, result);
    }
  }
  bool all = true;
  for (int lane = 0; lane < W; lane++) all = all && finite[lane] == 0.0f;
  int64_t bad = 0;
  for (ptrdiff_t i = 0; !all && i < r.places; i++)
    for (ptrdiff_t lane = 0; lane < r.lanes; lane++) bad += r.sums[i * WIDTH + lane] * 0.0f != 0.0f;
  return bad;
}

// Applies a softmax to the sums of some places, all of whose maps are in one block; returns as `end_run`.
template <class T>
int64_t end_softmax(const Bf16Conv &c, const Run &r) {
  for (ptrdiff_t i = 0; i < r.places; i++) {
    float *const sums = r.sums + i * WIDTH;
    const T *const more = static_cast<const T *>(c.addend) + r.addend + i * c.step[2] * c.add_voxel;
    for (ptrdiff_t lane = 0; c.addend != nullptr && lane < r.lanes; lane += W)
      store(sums + lane, load(sums + lane) + load_part(more + lane, (int)least(W, r.lanes - lane)));
  }
  int64_t bad = 0;
  for (ptrdiff_t i = 0; i < r.places; i++) {
    float *const sums = r.sums + i * WIDTH;
    for (ptrdiff_t lane = 0; lane < r.lanes; lane++) bad += sums[lane] * 0.0f != 0.0f;
    softmax(sums, 1, r.lanes);
    T *const out = static_cast<T *>(c.out) + r.out + i * c.step[2] * c.fout;
    for (ptrdiff_t lane = 0; lane < r.lanes; lane += W)
      store_part(out + lane, load(sums + lane), (int)least(W, r.lanes - lane));
  }
  return bad;
}

template <class T>
int64_t ended(const Bf16Conv &c, const Run &r) {
  switch (c.function) {
    case RELU: return end_run<RELU, T>(c, r);
    case LEAKY_RELU: return end_run<LEAKY_RELU, T>(c, r);
    case ELU: return end_run<ELU, T>(c, r);
    case SELU: return end_run<SELU, T>(c, r);
    case GELU: return end_run<GELU, T>(c, r);
    case GELU_TANH: return end_run<GELU_TANH, T>(c, r);
    case SILU: return end_run<SILU, T>(c, r);
    case SOFTPLUS: return end_run<SOFTPLUS, T>(c, r);
    case SIGMOID: return end_run<SIGMOID, T>(c, r);
    case TANH: return end_run<TANH, T>(c, r);
    case HARDSWISH: return end_run<HARDSWISH, T>(c, r);
    case CLIP: return end_run<CLIP, T>(c, r);
    case SOFTMAX: return end_softmax<T>(c, r);
    default: return end_run<NONE, T>(c, r);
  }
}

struct Plane {  // one plane of places of a unit
  const Unit &unit;
  const Bf16Phase &phase;
  ptrdiff_t z;      // its place along z
  ptrdiff_t pitch;  // places from row to row of blocks
};

struct Windowed {  // a position along an axis, in windows side by side
  ptrdiff_t window, within;
};

ALWAYS Windowed in_windows(ptrdiff_t at, ptrdiff_t size) {
  const ptrdiff_t window = size == 2 ? at >> 1 : at / size;  // a division takes long
  return {window, at - window * size};
}

// Raises the maxima of the windows that neighbouring outputs along x lie in. Outputs come in order along each axis: the
// first of a window begins its maximum.
template <class T>
ALWAYS void raise_maxima(const Bf16Conv &c, const Position &at, ptrdiff_t outputs, ptrdiff_t map,
                         const float *results) {
  const int64_t *const size = c.max_window, *const first = c.max_first, *const count = c.max_count;
  const ptrdiff_t begin = most(0, first[2] - at.x), end = least(outputs, first[2] + count[2] * size[2] - at.x);
  if (at.z < first[0] || at.y < first[1] || begin >= end) return;
  const Windowed z = in_windows(at.z - first[0], size[0]), y = in_windows(at.y - first[1], size[1]);
  if (z.window >= count[0] || y.window >= count[1]) return;
  const Windowed x = in_windows(at.x + begin - first[2], size[2]);
  const ptrdiff_t lanes = least(WIDTH, c.fout - map);
  const bool begins = z.within == 0 && y.within == 0;
  T *to = static_cast<T *>(c.maxima) + z.window * c.max_plane + y.window * c.max_row + x.window * c.fout + map;
  bool fresh = begins && x.within == 0;
  for (ptrdiff_t i = begin, next = i + size[2] - x.within; i < end; i = next, next += size[2], to += c.fout) {
    next = least(next, end);
    for (ptrdiff_t lane = 0; lane < lanes; lane += W) {
      const int some = (int)least(W, lanes - lane);
      V v = load(results + i * WIDTH + lane);
      for (ptrdiff_t other = i + 1; other < next; other++) v = larger(v, load(results + other * WIDTH + lane));
      if (!fresh) v = larger(v, some < W ? load_part(to + lane, some) : load(to + lane));
      put_lanes(to + lane, v, some, false);
    }
    fresh = begins;
  }
}

// Ends the part of a block that lies in the places whose outputs are wanted.
template <class T>
int64_t end_block(const Bf16Conv &c, const Plane &p, ptrdiff_t begin, ptrdiff_t places, ptrdiff_t map, float *sums) {
  const Bf16Phase &f = p.phase;
  alignas(64) float results[ROWS * WIDTH];  // of which maxima are taken
  float *const ended_at = c.maxima == nullptr ? nullptr : results;
  int64_t bad = 0;
  for (ptrdiff_t i = 0; i < places;) {
    const ptrdiff_t row = (begin + i) / p.pitch, column = (begin + i) % p.pitch, y = p.unit.first[1] + row;
    const ptrdiff_t next = least(places - i, p.pitch - column), x = p.unit.first[2] + column;
    const ptrdiff_t lo = most(x, f.lo[2]), hi = least(least(x + next, p.unit.first[2] + p.unit.count[2]), f.hi[2]);
    if (lo < hi && y >= f.lo[1] && y < f.hi[1]) {
      const ptrdiff_t oz = p.z * c.step[0] + f.at[0], oy = y * c.step[1] + f.at[1], ox = lo * c.step[2] + f.at[2];
      bad += ended<T>(c, {sums + (i + lo - x) * WIDTH, ended_at, hi - lo,
                          p.unit.image * c.out_image + oz * c.out_plane + oy * c.out_row + ox * c.fout + map,
                          oz * c.add_plane + oy * c.add_row + ox * c.add_voxel + map, least(WIDTH, c.fout - map)});
      if (ended_at) raise_maxima<T>(c, {oz, oy, ox}, hi - lo, map, ended_at);
    }
    i += next;
  }
  return bad;
}

struct Lists {  // of where inputs begin, by factors and words
  const char **first, **moved;  // of the first place of a plane; of that of a block
};

// Adds the sums of each place's taps along x, which are maps of its neighbours: map f of tap d is map d * fout + f.
ALWAYS void add_shifts(const Bf16Conv &c, ptrdiff_t places, float *sums) {
  for (ptrdiff_t i = 0; i < places; i++)
    for (ptrdiff_t tap = 1; tap < c.shifts; tap++)
      for (ptrdiff_t map = 0; map < c.fout; map++) sums[i * WIDTH + map] += sums[(i + tap) * WIDTH + tap * c.fout + map];
}

// Computes all maps of a plane of places from so many factors, whose inputs `lists.first` tells.
template <class T, int WORDS>
int64_t compute_plane(const Bf16Conv &c, const Plane &p, const Lists &lists, ptrdiff_t factors, ptrdiff_t voxel) {
  alignas(64) float sums[ROWS * WIDTH];
  const ptrdiff_t rows = c.flat ? 1 : p.unit.count[1];
  const ptrdiff_t row = c.flat ? (p.unit.count[1] - 1) * p.pitch + p.unit.count[2] : p.unit.count[2];
  const ptrdiff_t beside = c.shifts - 1;  // places of a block that only others need
  int64_t bad = 0;
  const char *kernels = static_cast<const char *>(p.phase.kernels);
  for (ptrdiff_t map = 0; map < c.fout; map += WIDTH) {
    const int panels = c.fout - map > LANES ? 2 : 1;
    for (ptrdiff_t r = 0; r < rows; r++) {
      for (ptrdiff_t first = 0; first < row; first += ROWS - beside) {
        const ptrdiff_t places = least(ROWS, row - first + beside), begin = r * p.pitch + first;
        for (ptrdiff_t i = 0; i < factors * WORDS; i++) lists.moved[i] = lists.first[i] + begin * voxel;
        const Sums s{lists.moved, factors, voxel, kernels, c.bias + map, sums};
        if (panels == 2) sum_rows<2, WORDS>(s, places);
        else sum_rows<1, WORDS>(s, places);
        if (beside) add_shifts(c, places - beside, sums);
        bad += end_block<T>(c, p, begin, places - beside, map, sums);
      }
    }
    kernels += panels * factors * WORDS * PANEL_BYTES;
  }
  return bad;
}

// Computes a plane of places of a convolution whose taps are one.
template <class T, int WORDS>
int64_t compute_gathered(const Bf16Conv &c, const Unit &u, ptrdiff_t z, char *scratch, const Lists &lists) {
  const Bf16Group &g = c.group[0];
  const char *planes[MOST_PLANES];
  char *const gathered = scratch + c.gathered;
  for (ptrdiff_t plane = 0; plane < c.window[0]; plane++)
    planes[plane] = scratch + g.ring + (z * g.stride[0] + c.phase->taps[0][2 * plane]) % g.depth * g.slot;
  gather(c, u, planes, gathered);
  for (ptrdiff_t i = 0; i < g.steps * WORDS; i++)
    lists.first[i] = gathered + i % WORDS * g.steps * 2 * STEP + i / WORDS * 2 * STEP;
  return compute_plane<T, WORDS>(c, {u, *c.phase, z, u.count[2]}, lists, g.steps, WORDS * g.steps * 2 * STEP);
}

// Lists where the inputs of all taps and steps of a phase begin, and returns how many these are.
template <int WORDS>
ptrdiff_t list_factors(const Bf16Conv &c, const Bf16Phase &f, ptrdiff_t z, char *scratch, const char **list) {
  const char **at = list;
  for (ptrdiff_t number = 0; number < c.groups; number++) {
    const Bf16Group &g = c.group[number];
    const Layout l(c, g);
    for (ptrdiff_t step = 0; step < g.steps; step++) {
      for (const int64_t *tap = f.taps[number]; tap < f.taps[number] + 2 * f.count[number]; tap += 2) {
        const char *const plane = scratch + g.ring + (z * g.stride[0] + tap[0]) % g.depth * g.slot;
        for (int word = 0; word < WORDS; word++) *at++ = plane + tap[1] + step * l.step + word * l.word;
      }
    }
  }
  return (at - list) / WORDS;
}

// Computes the planes of places of a unit; `done` is called behind each.
template <class T, int WORDS, class F>
ALWAYS int64_t compute_planes(const Bf16Conv &c, const Unit &u, char *scratch, F done) {
  const char **const list = reinterpret_cast<const char **>(scratch + c.lists);
  const Lists lists{list, list + c.factors};
  int64_t bad = 0;
  ptrdiff_t packed[MOST_GROUPS] = {};  // planes before it are packed, or not needed
  for (ptrdiff_t z = u.first[0]; z < u.first[0] + u.count[0]; z++) {
    for (ptrdiff_t number = 0; number < c.groups; number++) {
      const Bf16Group &g = c.group[number];
      ptrdiff_t &next = packed[number];
      for (next = most(next, z * g.stride[0]); next < z * g.stride[0] + g.depth; next++)
        pack_plane<T>(c, g, u, next, scratch + g.ring + next % g.depth * g.slot);
    }
    if (c.fold) bad += compute_gathered<T, WORDS>(c, u, z, scratch, lists);
    for (const Bf16Phase *f = c.phase; !c.fold && f < c.phase + c.phases; f++) {
      if (z < f->lo[0] || z >= f->hi[0]) continue;
      const ptrdiff_t factors = list_factors<WORDS>(c, *f, z, scratch, lists.first);
      bad += compute_plane<T, WORDS>(c, {u, *f, z, c.pitch}, lists, factors, 2 * STEP);
    }
    done(z);
  }
  return bad;
}

// Pools the places of a unit into fragments; values before pooling stay in scratch.
template <class T, int WORDS>
int64_t pool_unit(const Bf16Conv &c, const Unit &u, char *scratch) {
  Bf16Conv own = c;  // its output is one plane of places in scratch
  const ptrdiff_t rows = u.count[1] - c.pool[1] + 1, columns = u.count[2] - c.pool[2] + 1;
  const Maxima m{c.fout, rows, columns, u.count[2], c.pool[0], c.pool[1], c.pool[2]};
  T *const plane = reinterpret_cast<T *>(scratch + c.before_pool), *const ring = plane + u.count[1] * m.line();
  own.out_image = own.out_plane = 0;
  own.out_row = m.line();
  own.out = plane - (u.first[1] * own.out_row + u.first[2] * c.fout);
  own.past = 0;
  return compute_planes<T, WORDS>(own, u, scratch, [&](ptrdiff_t z) {
    m.of_plane(plane, ring + z % c.pool[0] * m.plane());
    const ptrdiff_t window = z - (c.pool[0] - 1);
    if (window < u.first[0]) return;
    T *const out = static_cast<T *>(c.out) + u.image * c.pool[0] * c.pool[1] * c.pool[2] * c.out_image;
    m.scatter(ring, out, {window, u.first[1], u.first[2]}, {c.out_image, c.out_plane, c.out_row}, c.past != 0);
  });
}

template <class T, int WORDS>
int64_t compute_unit(const Bf16Conv &c, const Unit &u, char *scratch) {
  if (c.pool[0] * c.pool[1] * c.pool[2] > 1) return pool_unit<T, WORDS>(c, u, scratch);
  return compute_planes<T, WORDS>(c, u, scratch, [](ptrdiff_t) {});
}

template <class T>
int64_t compute_unit(const Bf16Conv &c, const Unit &u, char *scratch) {
  if constexpr (sizeof(T) == 4) {
    if (c.words == 3) return compute_unit<T, 3>(c, u, scratch);
    if (c.words == 2) return compute_unit<T, 2>(c, u, scratch);
  }
  return compute_unit<T, 1>(c, u, scratch);
}

Unit unit_of(const Bf16Conv &c, int64_t number) {
  Unit u;
  for (int axis = 2; axis >= 0; axis--) {
    const int64_t along = (c.windows[axis] + c.before[axis] + c.unit[axis] - 1) / c.unit[axis];
    const int64_t first = number % along * c.unit[axis] - c.before[axis];
    u.first[axis] = most(0, first);
    u.count[axis] = least(first + c.unit[axis], c.windows[axis]) - u.first[axis] + c.pool[axis] - 1;
    number /= along;
  }
  u.image = number;
  return u;
}

}  // namespace
}  // namespace znnpy

using namespace znnpy;

// Computes units [lo, hi). `scratch` holds the packed planes, and the gathered places of a convolution whose taps are
// one. Returns how many sums are infinite or not a number.
EXPORT int64_t znnpy_bf16_conv(const Bf16Conv *conv, char *scratch, int64_t lo, int64_t hi) {
  const Bf16Conv &c = *conv;
  int64_t bad = 0;
  unit_begin();
  for (int64_t number = lo; number < hi; number++) {
    const Unit u = unit_of(c, number);
    bad += c.floats ? compute_unit<float>(c, u, scratch) : compute_unit<Bf16>(c, u, scratch);
  }
  unit_end();
  if (c.past) fence();
  return bad;
}

EXPORT int64_t znnpy_version() { return VERSION; }

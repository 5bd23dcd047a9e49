/* Sums of the results of windows: results are added times their weights, and finished sums become what is written.
 *
 * Computes   take     row = kept, in float.
 *            clear    zeros.
 *            add      sums[z, y, x, m] += result[z, y, x, m] * weights[z, y, x] * share, and the last map of sums, the
 *                     sum of the weights, += weights[z, y, x] where `counts`.
 *            finish   the mean of the sums, a function of it, and maps, labels or thresholds of these.
 * Shapes     boxes (z, y, x, maps), the maps of a voxel next to each other; steps in values from plane to plane, line to
 *            line and voxel to voxel; those of results may be negative.
 * Bound      memory: everything is read once and written once.
 * Tested     tests/kernels/gpu/test_blend.py
 */
#include "device_ops.cuh"

constexpr int MAPS = 0, LABELS = 1, ABOVE = 2;      // kinds of results, as in blend.py
constexpr int PLAIN = 0, SOFTMAX = 1, SIGMOID = 2;  // functions of means, as in blend.py

DEVICE void write(float* to, float value) { *to = value; }
DEVICE void write(half* to, float value) { *to = to_half(value); }

/* Places of value i of a box with `maps` values a voxel: z, y, x, map. */
struct Place {
    long long z, y, x, map;
    DEVICE Place(long long i, long long n_y, long long n_x, long long maps) {
        map = i % maps, i /= maps;
        x = i % n_x, i /= n_x;
        y = i % n_y, z = i / n_y;
    }
};

/* Raises `peak` to the largest |kept|. */
template <class K>
__global__ void take(const K* kept, long long kept_z, long long kept_y, float* row, long long row_z, long long row_y,
                     long long n_z, long long n_y, long long n_x, long long maps, float* peak) {
    float largest = 0.0f;
    const long long count = n_z * n_y * n_x * maps, line = n_x * maps;
    for (long long i = global_thread(); i < count; i += global_threads()) {
        const long long at = i % line, y = i / line % n_y, z = i / line / n_y;
        const float value = to_float(kept[z * kept_z + y * kept_y + at]);
        largest = larger_magnitude(largest, value);
        row[z * row_z + y * row_y + at] = value;
    }
    raise_peak_by_warp(peak, largest);
}

/* A line is `line` values without gaps. */
template <class K>
__global__ void clear(K* sums, long long sums_z, long long sums_y, long long n_z, long long n_y, long long line) {
    for (long long i = global_thread(); i < n_z * n_y * line; i += global_threads())
        write(sums + i / line / n_y * sums_z + i / line % n_y * sums_y + i % line, 0.0f);
}

/* Sums have `held` values a voxel, of which those from `first` on are the result's. */
template <class T, class K>
__global__ void add(K* sums, long long sums_z, long long sums_y, long long held, long long first, const T* result,
                    long long result_z, long long result_y, long long result_x, const float* weights,
                    long long weights_z, long long weights_y, long long weights_x, long long n_z, long long n_y,
                    long long n_x, long long maps, float share, long long counts) {
    const long long each = maps + (counts != 0);
    for (long long i = global_thread(); i < n_z * n_y * n_x * each; i += global_threads()) {
        const Place at(i, n_y, n_x, each);
        const float weight = weights[at.z * weights_z + at.y * weights_y + at.x * weights_x];
        const bool is_weight = at.map == maps;
        K* const sum = sums + at.z * sums_z + at.y * sums_y + at.x * held + (is_weight ? held - 1 : first + at.map);
        const float value =
            is_weight ? 1.0f
                      : to_float(result[at.z * result_z + at.y * result_y + at.x * result_x + at.map]) * share;
        write(sum, to_float(*sum) + value * weight);
    }
}

DEVICE void put(float* out, float value, bool) { *out = value; }
DEVICE void put(half* out, float value, bool) { *out = to_half(value); }
DEVICE void put(unsigned char* out, float value, bool whole) {
    *out = (unsigned char)(whole ? value : rintf(fminf(fmaxf(value, 0.0f), 1.0f) * 255.0f));  // rintf: half to even
}

/* Sums have members * maps values a voxel and the sum of the weights, and are overwritten. out (maps of the result, z, y,
 * x) has any strides. `peak` is raised to the largest |value| that is written.
 */
template <class Out>
__global__ void finish(float* sums, long long sums_z, long long sums_y, Out* out, long long out_f, long long out_z,
                       long long out_y, long long out_x, long long n_z, long long n_y, long long n_x, long long maps,
                       long long members, long long function, long long kind, const float* above, float* peak) {
    float largest = 0.0f;
    for (long long i = global_thread(); i < n_z * n_y * n_x; i += global_threads()) {
        const Place at(i, n_y, n_x, 1);
        float* const mine = sums + at.z * sums_z + at.y * sums_y + at.x * (members * maps + 1);
        Out* const to = out + at.z * out_z + at.y * out_y + at.x * out_x;
        const float total = mine[members * maps];
        for (long long member = 0; member < members; ++member) {
            float* const own = mine + member * maps;
            float most = -INFINITY, sum = 0.0f;
            for (long long m = 0; m < maps; ++m) {
                const float mean = own[m] / total;
                own[m] = function == SIGMOID ? 1.0f / (1.0f + expf(-mean)) : mean;
                most = maximum(most, mean);
            }
            if (function != SOFTMAX) continue;
            for (long long m = 0; m < maps; ++m) sum += own[m] = expf(own[m] - most);
            for (long long m = 0; m < maps; ++m) own[m] /= sum;
        }
        float best = 0.0f;
        long long label = 0;
        for (long long m = 0; m < maps; ++m) {
            float value = mine[m];
            for (long long member = 1; member < members; ++member) value += mine[member * maps + m];
            if (members > 1) value /= (float)members;
            largest = larger_magnitude(largest, value);
            if (kind == MAPS) put(to + m * out_f, value, false);
            if (kind == ABOVE) put(to + m * out_f, value > above[m] ? 1.0f : 0.0f, true);
            const bool is_nan = value != value, was_nan = best != best;  // the first NaN counts as the largest
            if (m == 0 || (!was_nan && (is_nan || value > best))) best = value, label = m;
        }
        if (kind == LABELS) put(to, (float)label, true);
    }
    raise_peak_by_warp(peak, largest);
}

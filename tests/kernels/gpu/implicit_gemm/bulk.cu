/* Bulk copies of wgmma.cuh, which only sm_90 and newer have, for test_warpgroup.py. */
#include "wgmma.cuh"

enum Fault { NO_FAULT, NOBODY_WAITS, WRONG_PHASE, COMES_EARLY, ODD_BYTES, OVERWRITES, COMMITS_LATE };

/* out = in + 1, 128 floats a round, into one half of their memory or the other, and out again; 128 threads. */
template <int FAULT> __global__ void bulk_copies(const float* in, float* out, long long rounds) {
    SHARED(float, parts, [2][128]);
    SHARED(float, staged, [128]);
    SHARED(Arrival, arrivals, [2]);
    const int i = threadIdx.x, bytes = FAULT == ODD_BYTES ? 504 : 512;
    if (i == 0) {
        for (Arrival& arrival : arrivals) arrival_begin(&arrival);
        bulk_load(parts[0], in, 512, arrivals);
    }
    sync_block();
    for (int r = 0; r < rounds; ++r) {
        const int next = FAULT == COMES_EARLY ? r & 1 : (r + 1) & 1;
        if (i == 0 && r + 1 < rounds && FAULT != COMES_EARLY)
            bulk_load(parts[next], in + 128 * (r + 1), 512, arrivals + ((r + 1) & 1));
        if (FAULT != NOBODY_WAITS) arrival_wait(arrivals + (r & 1), (r / 2 & 1) ^ (FAULT == WRONG_PHASE));
        if (i == 0 && r + 1 < rounds && FAULT == COMES_EARLY)  // where this round's values are still read
            bulk_load(parts[next], in + 128 * (r + 1), 512, arrivals + ((r + 1) & 1));
        if (FAULT != OVERWRITES) bulk_wait();
        sync_block();
        staged[i] = parts[r & 1][i] + 1.0f;
        wgmma_publish();
        sync_block();
        if (i == 0) bulk_store(out + 128 * r, staged, bytes);
        if (FAULT != COMMITS_LATE) bulk_commit();
    }
    bulk_commit();
    bulk_finish();
}

// What the routing kernels write to a route telemetry record while it is armed.
//
// A call opens the record, marks each of its rows once, and finishes:
//
//     RouteRecord* record = open_record(arguments.telemetry, experts, top_k);    // null: nothing to record
//     if (record) { record_row(record, row, rows, selected, lane, 32); }
//     if (record) { __syncthreads(); if (threadIdx.x == 0) finish_record(record, rows, gridDim.x); }
//
// `rows` is the number of valid rows of the call, the same in all its threads. Whoever finishes last advances the
// record, so that all rows of a call see it as it was before the call, and results don't depend on the order of blocks.
//
// The record is the header below, then its bitmap (32-bit words, an even number), its 64-bit counts (one per expert;
// none in mode bitmap) and, only in mode trace, the ring of its last rows (trace_rows * routes_per_row ints) and that of
// their logit margins (trace_rows floats; only where trace_margins says so).

#pragma once

namespace qmoe {

struct RouteRecord {
    unsigned recording;  // 0: paused; changed between calls only
    unsigned mode;
    int num_experts;
    int routes_per_row;
    unsigned long long epoch;
    unsigned long long rows;
    unsigned long long routes;
    unsigned saturated;
    unsigned ticket;  // parts of the present call that have finished; 0 between calls
    unsigned trace_rows;
    unsigned trace_next;  // place in the ring of the next row
    unsigned trace_held;
    unsigned trace_margins;  // 0: none are kept
    unsigned long long trace_lost;
};

constexpr unsigned kRecordBitmap = 0;
constexpr unsigned kRecordCounts = 1;
constexpr unsigned kRecordTrace = 2;

// Half of the range, so that what one call adds to a full counter can't wrap it before the call's end.
constexpr unsigned long long kRecordCeiling = (1ull << 63) - 1;

__device__ __forceinline__ unsigned* record_bitmap(RouteRecord* record) {
    return reinterpret_cast<unsigned*>(record + 1);
}

__device__ __forceinline__ unsigned long long* record_counts(RouteRecord* record) {
    return reinterpret_cast<unsigned long long*>(record + 1) + (record->num_experts + 63) / 64;
}

__device__ __forceinline__ int* record_trace(RouteRecord* record) {
    return reinterpret_cast<int*>(record_counts(record) + record->num_experts);
}

// The record if this call is to be recorded: armed, not paused, made for these sizes.
__device__ __forceinline__ RouteRecord* open_record(void* telemetry, int experts, int top_k) {
    RouteRecord* record = static_cast<RouteRecord*>(telemetry);
    const bool wanted = record && record->recording && record->num_experts == experts &&
                        record->routes_per_row == top_k;
    return wanted ? record : nullptr;
}

// Mark one row by `lanes` threads, of which this one is `lane`: it reads selected[lane], selected[lane + lanes], …, with
// 32 lanes exactly what it wrote itself in select_experts.
__device__ __forceinline__ void record_row(RouteRecord* record, long long row, long long rows, const int* selected,
                                           int lane, int lanes) {
    const int top_k = record->routes_per_row;
    const bool counted = record->mode >= kRecordCounts;
    unsigned* bitmap = record_bitmap(record);
    unsigned long long* counts = record_counts(record);
    int* place = nullptr;
    if (record->mode == kRecordTrace && rows - row <= record->trace_rows) {
        place = record_trace(record) + (record->trace_next + row) % record->trace_rows * top_k;
    }
    for (int slot = lane; slot < top_k; slot += lanes) {
        const int expert = selected[slot];
        const unsigned bit = 1u << expert % 32;
        // A set bit stays set until the window ends, so most rows need no atomic for it.
        if (!(bitmap[expert / 32] & bit)) {
            atomicOr(bitmap + expert / 32, bit);
        }
        if (counted) {
            atomicAdd(counts + expert, 1ull);
        }
        if (place) {
            place[slot] = expert;
        }
    }
}

// Where the logit margin of a row belongs; null where none is kept.
__device__ __forceinline__ float* margin_place(RouteRecord* record, long long row, long long rows) {
    if (!record->trace_margins || rows - row > record->trace_rows) {
        return nullptr;
    }
    const unsigned long long ring = record->trace_rows;
    float* margins = reinterpret_cast<float*>(record_trace(record) + ring * record->routes_per_row);
    return margins + (record->trace_next + row) % ring;
}

// Both at most kRecordCeiling.
__device__ __forceinline__ unsigned long long record_sum(RouteRecord* record, unsigned long long a,
                                                         unsigned long long b) {
    const unsigned long long sum = a + b;
    if (sum <= kRecordCeiling) {
        return sum;
    }
    record->saturated = 1;
    return kRecordCeiling;
}

// Finish one of the `parts` of a call (blocks, say), by one thread that the part's marks are ordered before.
__device__ __forceinline__ void finish_record(RouteRecord* record, long long rows, unsigned parts) {
    if (parts > 1) {
        __threadfence();
        if (atomicAdd(&record->ticket, 1u) != parts - 1) {
            return;
        }
        __threadfence();
        record->ticket = 0;
    }
    const unsigned long long added = rows > 0 ? rows : 0;
    record->rows = record_sum(record, record->rows, added);
    record->routes = record_sum(record, record->routes, added * record->routes_per_row);
    // No count exceeds `routes`, so as long as those fit nothing needs a look.
    if (record->mode >= kRecordCounts && record->saturated) {
        volatile unsigned long long* counts = record_counts(record);
        for (int expert = 0; expert < record->num_experts; ++expert) {
            if (counts[expert] > kRecordCeiling) {
                counts[expert] = kRecordCeiling;
            }
        }
    }
    if (record->mode == kRecordTrace) {
        const unsigned long long held = record->trace_held + added;
        const unsigned long long ring = record->trace_rows;
        record->trace_next = static_cast<unsigned>((record->trace_next + added) % ring);
        record->trace_held = static_cast<unsigned>(held < ring ? held : ring);
        record->trace_lost = record_sum(record, record->trace_lost, held < ring ? 0 : held - ring);
    }
}

}  // namespace qmoe

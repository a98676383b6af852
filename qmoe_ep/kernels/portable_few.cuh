// Portable kernels for few rows: each route multiplies its expert's weights with one vector.
//
// A warp takes four weight rows at a time, so that the activations it reads (16 per lane and step) serve four products
// and at least four code loads per lane are in flight. Bound by instruction issue (decode and multiply-add), at wide
// codes by the reading of the weights.

#pragma once

#include "portable_arguments.cuh"

namespace qmoe::portable {

constexpr int kRowsPerWarp = 4;
constexpr int kFewWarps = 8;

// Dot products of `Rows` weight rows with one vector, the same bits in every lane. Lane l takes chunks l, l + 32, …:
// sixteen products are summed before they join the lane's sum.
template <class F, int Rows>
struct ChunkRows {
    MatrixRow row[Rows];
    float sum[Rows];

    __device__ __forceinline__ void add(const Chunk<F::kBits> (&chunk)[Rows], const float (&x)[kChunkCodes],
                                        int present) {
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            float partial = 0.0f;
#pragma unroll
            for (int j = 0; j < kChunkCodes; ++j) {
                const float w = chunk_value<F>(chunk[r], j);
                if constexpr (F::kWhole) {
                    partial = fmaf(w, x[j], partial);
                } else {
                    partial = j < present ? fmaf(w, x[j], partial) : partial;
                }
            }
            sum[r] += partial;
        }
    }

    __device__ __forceinline__ void load(Chunk<F::kBits> (&chunk)[Rows], int index, int in_features) const {
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            chunk[r] = load_chunk<F>(row[r], index, in_features);
        }
    }

    __device__ __forceinline__ void reduce() {
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            sum[r] = warp_sum(sum[r]);
        }
    }
};

// Sixteen activations of a chunk, zero past the end of the vector. Returns how many there are.
template <bool Tail, int LoadBytes, class T>
__device__ __forceinline__ int load_chunk_values(const T* vector, int index, int size, float (&x)[kChunkCodes]) {
    const T* source = vector + static_cast<long long>(index) * kChunkCodes;
    const long long left = size - static_cast<long long>(index) * kChunkCodes;
    if (!Tail || left >= kChunkCodes) {
        load_values<kChunkCodes, LoadBytes>(source, x);
        return kChunkCodes;
    }
    load_values_guarded<kChunkCodes>(source, static_cast<int>(left), x);
    return static_cast<int>(left);
}

__device__ __forceinline__ int row_chunks(int in_features) { return (in_features + kChunkCodes - 1) / kChunkCodes; }

// A warp owns a few features of one route (two where gate and up are both needed, else four): it reads their weight
// rows and the row's input, and writes the activated features.
template <class L>
__device__ __forceinline__ void gate_up_few(const GateUpArguments& a) {
    constexpr int kFeatures = L::kGated ? kRowsPerWarp / 2 : kRowsPerWarp;
    constexpr bool kTail = !L::Gate::kWhole;
    const int lane = threadIdx.x % 32;
    const int tiles = (a.inter + kFeatures - 1) / kFeatures;
    const long long items = static_cast<long long>(a.routes) * tiles;
    const Matrix fc1 = fc1_matrix(a, L::kFused);
    const Matrix third = L::kFused ? fc1 : fc3_matrix(a);
    const int chunks = row_chunks(a.hidden);
    for (long long item = static_cast<long long>(blockIdx.x) * kFewWarps + threadIdx.x / 32; item < items;
         item += static_cast<long long>(gridDim.x) * kFewWarps) {
        const int route = static_cast<int>(item / tiles);
        const int first = static_cast<int>(item % tiles) * kFeatures;
        const int expert = a.route_experts[route];
        if (expert < 0) {
            continue;
        }
        ChunkRows<typename L::Gate, kFeatures> gate;
        ChunkRows<typename L::Up, kFeatures> up;
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) {
            const int feature = min(first + f, a.inter - 1);
            gate.row[f] = matrix_row<typename L::Gate>(fc1, expert, gate_row<L::kGating>(feature));
            gate.sum[f] = up.sum[f] = 0.0f;
            if constexpr (L::kGated) {
                up.row[f] = matrix_row<typename L::Up>(third, expert, up_row<L::kGating>(feature, a.inter));
            }
        }
        const auto* x_row = static_cast<const typename L::Input*>(a.input) +
                            static_cast<long long>(route / a.top_k) * a.hidden;
        for (int index = lane; index < chunks; index += 32) {
            Chunk<L::Gate::kBits> gate_chunk[kFeatures];
            Chunk<L::Up::kBits> up_chunk[kFeatures];
            float x[kChunkCodes];
            gate.load(gate_chunk, index, a.hidden);
            if constexpr (L::kGated) {
                up.load(up_chunk, index, a.hidden);
            }
            const int present = load_chunk_values<kTail, L::kInputBytes>(x_row, index, a.hidden, x);
            gate.add(gate_chunk, x, present);
            if constexpr (L::kGated) {
                up.add(up_chunk, x, present);
            }
        }
        gate.reduce();
        if constexpr (L::kGated) {
            up.reduce();
        }
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) {
            const int feature = first + f;
            if (lane != f || feature >= a.inter) {
                continue;
            }
            const int own = gate_row<L::kGating>(feature);
            float value = gate.sum[f] + load_bias<typename L::Gate>(fc1, expert, own);
            if constexpr (L::kGated) {
                const int other = up_row<L::kGating>(feature, a.inter);
                value = activate_gated_as<L::kActivation>(
                    value, up.sum[f] + load_bias<typename L::Up>(third, expert, other), a.scalars);
            } else {
                value = activate<L::kActivation>(value);
            }
            a.activated[static_cast<long long>(route) * a.activated_stride + feature] = value;
        }
    }
}

// One slot's FC2 with bias for kRowsPerWarp features from `first` on, by one warp; lane f writes feature first + f.
template <class F>
__device__ __forceinline__ void down_slot(const DownArguments& a, long long route, int first, float* result) {
    constexpr bool kTail = !F::kWhole;
    const int lane = threadIdx.x % 32;
    const int expert = a.route_experts[route];
    const Matrix fc2 = fc2_matrix(a);
    ChunkRows<F, kRowsPerWarp> rows;
#pragma unroll
    for (int f = 0; f < kRowsPerWarp; ++f) {
        rows.row[f] = matrix_row<F>(fc2, expert, min(first + f, a.hidden - 1));
        rows.sum[f] = 0.0f;
    }
    const float* vector = a.activated + route * a.activated_stride;
    const int chunks = row_chunks(a.inter);
    for (int index = lane; index < chunks; index += 32) {
        Chunk<F::kBits> chunk[kRowsPerWarp];
        float x[kChunkCodes];
        rows.load(chunk, index, a.inter);
        const int present = load_chunk_values<kTail, kActivatedBytes>(vector, index, a.inter, x);
        rows.add(chunk, x, present);
    }
    rows.reduce();
#pragma unroll
    for (int f = 0; f < kRowsPerWarp; ++f) {
        if (lane == f && first + f < a.hidden) {
            result[f] = rows.sum[f] + load_bias<F>(fc2, expert, first + f);
        }
    }
}

// A block owns up to 32 features of one row: slots_at_once of its warps take a slot each, the others more features.
// It reads the row's activated routes and their FC2 rows, sums weight * result in slot order, and writes the output,
// rounded once. Rows without experts are left as they are.
template <class F, class Output>
__device__ __forceinline__ void down_few(const DownArguments& a) {
    __shared__ float partial[kFewWarps][kRowsPerWarp];
    const int warp = threadIdx.x / 32;
    const int features = kFewWarps / a.slots_at_once * kRowsPerWarp;
    const int tiles = (a.hidden + features - 1) / features;
    const long long items = static_cast<long long>(a.rows) * tiles;
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const long long row = item / tiles;
        const int first = static_cast<int>(item % tiles) * features;
        const long long first_route = row * a.top_k;
        if (a.route_experts[first_route] < 0) {
            continue;
        }
        const int own = threadIdx.x;  // feature that this thread sums, if it has one
        const bool sums = own < features && first + own < a.hidden;
        float total = 0.0f;
        for (int base = 0; base < a.top_k; base += a.slots_at_once) {
            const int slot = base + warp % a.slots_at_once;
            const int warp_first = first + warp / a.slots_at_once * kRowsPerWarp;
            if (slot < a.top_k && warp_first < a.hidden) {
                down_slot<F>(a, first_route + slot, warp_first, partial[warp]);
            }
            __syncthreads();
            const int present = min(a.slots_at_once, a.top_k - base);
            for (int s = 0; sums && s < present; ++s) {
                const float value = partial[own / kRowsPerWarp * a.slots_at_once + s][own % kRowsPerWarp];
                total = fmaf(a.route_weights[first_route + base + s], value, total);
            }
            __syncthreads();
        }
        if (sums) {
            static_cast<Output*>(a.output)[row * a.hidden + first + own] = from_float<Output>(total);
        }
    }
}

}  // namespace qmoe::portable

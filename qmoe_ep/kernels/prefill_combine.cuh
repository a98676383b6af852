// The combination of a row's contributions, four features at a time.

#pragma once

#include "prefill_pairs.cuh"
#include "prefill_pipeline.cuh"

namespace qmoe::prefill {

constexpr int kCombineThreads = 256;
constexpr int kCombineFeatures = 4;  // per thread

struct CombineArguments {
    const float* contributions;  // [rows * top_k, hidden]
    const int* route_experts;
    const float* route_weights;
    void* output;  // [rows, hidden]
    int rows;
    int top_k;
    int hidden;  // a multiple of 4
};

// A block owns up to 1024 features of a row: it reads their contributions and the row's weights, sums them in slot
// order in float, and writes them, rounded once. Rows without experts are left as they are. Bound by the reading.
template <class Output, int StoreBytes>
__device__ __forceinline__ void combine(const CombineArguments& a) {
    dependent_begin();
    constexpr int kPerBlock = kCombineThreads * kCombineFeatures;
    const int pieces = (a.hidden + kPerBlock - 1) / kPerBlock;
    for (long long item = blockIdx.x; item < static_cast<long long>(a.rows) * pieces; item += gridDim.x) {
        const long long row = item / pieces;
        const int feature =
            (static_cast<int>(item % pieces) * kCombineThreads + static_cast<int>(threadIdx.x)) * kCombineFeatures;
        const long long first = row * a.top_k;
        if (feature >= a.hidden || a.route_experts[first] < 0) {
            continue;
        }
        const float* source = a.contributions + first * a.hidden + feature;
        float total[kCombineFeatures] = {};
#pragma unroll 8
        for (int slot = 0; slot < a.top_k; ++slot) {
            const float* own = source + static_cast<long long>(slot) * a.hidden;
            const float4 part = __ldcs(reinterpret_cast<const float4*>(own));
            const float weight = a.route_weights[first + slot];
            total[0] = fmaf(weight, part.x, total[0]);
            total[1] = fmaf(weight, part.y, total[1]);
            total[2] = fmaf(weight, part.z, total[2]);
            total[3] = fmaf(weight, part.w, total[3]);
        }
        Output* to = static_cast<Output*>(a.output) + row * a.hidden + feature;
        if constexpr (StoreBytes == 8) {
            *reinterpret_cast<uint2*>(to) = uint2{PairMath<Output>::pack(total[0], total[1]),
                                                  PairMath<Output>::pack(total[2], total[3])};
        } else {
#pragma unroll
            for (int i = 0; i < kCombineFeatures; ++i) {
                to[i] = from_float<Output>(total[i]);
            }
        }
    }
}

}  // namespace qmoe::prefill

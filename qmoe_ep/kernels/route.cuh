// Selection of experts and their weights, one warp per row.
//
// Experts are ordered by one 64-bit rank: the logit's bits as an integer that sorts by IEEE total order, at the
// operand's own width, then the complement of the index, so that equal logits go to the lowest index. Ranks of a row
// are distinct and never 0, which therefore can mean "none left" whatever the logits hold. "Already selected" needs no
// memory either: it means a rank that isn't below the last one taken.

#pragma once

#include "float_types.cuh"
#include "route_record.cuh"

namespace qmoe {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ unsigned order_key(float value) {
    const unsigned bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

template <class T>
__device__ __forceinline__ unsigned order_key(T value) {
    const unsigned bits = value.bits;
    return bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
}

template <class T>
__device__ __forceinline__ unsigned long long expert_rank(T logit, int expert) {
    return static_cast<unsigned long long>(order_key(logit)) << 32 | ~static_cast<unsigned>(expert);
}

__device__ __forceinline__ int ranked_expert(unsigned long long rank) {
    return static_cast<int>(~static_cast<unsigned>(rank));
}

__device__ __forceinline__ unsigned warp_max(unsigned value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(kAllLanes, value);
#else
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        value = max(value, __shfl_xor_sync(kAllLanes, value, offset));
    }
    return value;
#endif
}

__device__ __forceinline__ unsigned long long warp_max(unsigned long long rank) {
    const unsigned key = static_cast<unsigned>(rank >> 32);
    const unsigned best = warp_max(key);
    const unsigned tied = warp_max(key == best ? static_cast<unsigned>(rank) : 0u);
    return static_cast<unsigned long long>(best) << 32 | tied;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
    }
    return value;
}

// The same bits in every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(kAllLanes, value, offset);
    }
    return value;
}

// The best rank below `ceiling` among the experts of one lane: lane, lane + 32, …; 0 if there is none.
template <class T>
__device__ __forceinline__ unsigned long long best_of_lane(const T* logits, int experts, int lane,
                                                           unsigned long long ceiling) {
    unsigned long long best = 0;
#pragma unroll 4
    for (int expert = lane; expert < experts; expert += 32) {
        const unsigned long long rank = expert_rank(logits[expert], expert);
        best = rank < ceiling && rank > best ? rank : best;
    }
    return best;
}

// Write the experts of a row in descending order: selected[slot], each slot by lane slot % 32, which alone may read
// it back without a fence. Every round one lane loses its best and looks for its next; the others keep theirs.
template <class T>
__device__ __forceinline__ void select_experts(const T* logits, int experts, int top_k, int lane, int* selected) {
    unsigned long long own = best_of_lane(logits, experts, lane, ~0ull);
    for (int slot = 0; slot < top_k; ++slot) {
        const unsigned long long best = warp_max(own);
        const int expert = ranked_expert(best);
        if (lane == slot % 32) {
            selected[slot] = expert;
        }
        if (own == best) {
            own = best_of_lane(logits, experts, lane, best);
        }
    }
}

// Mark a row in the record by the warp that selected its experts: the experts and, where it keeps them, the margin, which
// is the smallest selected logit less the largest rejected one, infinite where none is rejected.
template <class T>
__device__ __forceinline__ void record_choice(RouteRecord* record, long long row, long long rows, const T* logits,
                                              const int* selected, int lane) {
    record_row(record, row, rows, selected, lane, 32);
    float* place = margin_place(record, row, rows);
    if (place) {
        const int slot = record->routes_per_row - 1;
        const int last = __shfl_sync(kAllLanes, lane == slot % 32 ? selected[slot] : 0, slot % 32);
        const unsigned long long below = expert_rank(logits[last], last);
        const unsigned long long next = warp_max(best_of_lane(logits, record->num_experts, lane, below));
        if (lane == 0) {
            *place = next ? to_float(logits[last]) - to_float(logits[ranked_expert(next)]) : kInfinity;
        }
    }
}

// Softmax over `count` values, value(i) read by lane i % 32. NaN, +infinity or nothing but -infinity among them make
// the sum NaN, and with it every weight.
struct Softmax {
    float peak;
    float sum;
    __device__ __forceinline__ float weight(float logit) const { return expf(logit - peak) / sum; }
};

template <class Value>
__device__ __forceinline__ Softmax warp_softmax(int count, int lane, Value value) {
    float peak = -kInfinity;
    for (int i = lane; i < count; i += 32) {
        peak = fmaxf(peak, value(i));
    }
    peak = warp_max(peak);
    float sum = 0.0f;
    for (int i = lane; i < count; i += 32) {
        sum += expf(value(i) - peak);
    }
    return Softmax{peak, warp_sum(sum)};
}

// Float sum in slot order, the same bits in every lane.
template <class Value>
__device__ __forceinline__ float warp_ordered_sum(int count, int lane, Value value) {
    float sum = 0.0f;
    for (int base = 0; base < count; base += 32) {
        const float own = base + lane < count ? value(base + lane) : 0.0f;
        const int present = min(count - base, 32);
        for (int j = 0; j < present; ++j) {
            sum += __shfl_sync(kAllLanes, own, j);
        }
    }
    return sum;
}

// 1 / sum of exp(x - own) over the experts near the own logit: own - x <= 0.02 max(|x|, own), but for those that an
// earlier slot selected.
template <class Logit>
__device__ __forceinline__ float sparse_mixer_weight(const Logit* logits, int experts, int slot, int lane,
                                                     const int* selected) {
    const float own = to_float(logits[selected[slot]]);
    float sum = 0.0f;
    for (int expert = lane; expert < experts; expert += 32) {
        bool left = true;
        for (int earlier = 0; earlier < slot; ++earlier) {
            left = left && selected[earlier] != expert;
        }
        const float value = to_float(logits[expert]);
        const float magnitude = fabsf(value);
        const float reach = 0.02f * (magnitude > own ? magnitude : own);
        if (left && !(own - value > reach)) {
            sum += expf(value - own);
        }
    }
    return 1.0f / warp_sum(sum);
}

// Weights of the selected experts. Weight is the type of router_weights, void where the logits' softmax is used.
template <class Logit, class Weight, bool normalize>
__device__ __forceinline__ void weigh_experts(const Logit* logits, const void* router_weights, int experts, int top_k,
                                              int lane, const int* selected, float* weights) {
    if constexpr (!kIsVoid<Weight>) {
        const Weight* given = static_cast<const Weight*>(router_weights);
        const auto value = [&](int slot) { return to_float(given[selected[slot]]); };
        float total = 1.0f;
        if constexpr (normalize) {
            total = warp_ordered_sum(top_k, lane, value);
        }
        for (int slot = lane; slot < top_k; slot += 32) {
            const float weight = value(slot);
            weights[slot] = !normalize ? weight : total == 0.0f ? 0.0f : weight / total;
        }
    } else {
        const auto chosen = [&](int slot) { return to_float(logits[selected[slot]]); };
        const auto any = [&](int expert) { return to_float(logits[expert]); };
        const Softmax softmax = normalize ? warp_softmax(top_k, lane, chosen) : warp_softmax(experts, lane, any);
        for (int slot = lane; slot < top_k; slot += 32) {
            weights[slot] = softmax.weight(chosen(slot));
        }
    }
}

struct RouteArguments {
    const void* router_probs;
    const void* router_weights;
    const int* valid_rows;
    void* telemetry;
    int* route_experts;
    float* route_weights;
    int rows;
    int experts;
    int top_k;
};

// One warp owns a row: it reads the row's logits (and router weights) and writes its top_k experts and weights. Rows
// past valid_rows get expert -1 and weight 0, by which the kernels that follow know them. An armed telemetry record
// is advanced by the call's valid rows. A row's logits stay in the first-level cache between the rounds; the rounds'
// latency bounds it.
template <class Logit, class Weight, bool normalize, bool sparse_mixer>
__device__ __forceinline__ void route_rows(const RouteArguments& a) {
    const int lane = threadIdx.x % 32;
    const int warps = blockDim.x / 32;
    const int valid = a.valid_rows ? min(*a.valid_rows, a.rows) : a.rows;
    RouteRecord* record = open_record(a.telemetry, a.experts, a.top_k);
    for (long long row = static_cast<long long>(blockIdx.x) * warps + threadIdx.x / 32; row < a.rows;
         row += static_cast<long long>(gridDim.x) * warps) {
        int* selected = a.route_experts + row * a.top_k;
        float* weights = a.route_weights + row * a.top_k;
        if (row >= valid) {
            for (int slot = lane; slot < a.top_k; slot += 32) {
                selected[slot] = -1;
                weights[slot] = 0.0f;
            }
            continue;
        }
        const Logit* logits = static_cast<const Logit*>(a.router_probs) + row * a.experts;
        const void* given = nullptr;
        if constexpr (!kIsVoid<Weight>) {
            given = static_cast<const Weight*>(a.router_weights) + row * a.experts;
        }
        select_experts(logits, a.experts, a.top_k, lane, selected);
        if (record) {
            record_choice(record, row, valid, logits, selected, lane);
        }
        if constexpr (sparse_mixer) {
            __syncwarp();
            for (int slot = 0; slot < a.top_k; ++slot) {
                const float weight = sparse_mixer_weight(logits, a.experts, slot, lane, selected);
                if (lane == 0) {
                    weights[slot] = weight;
                }
            }
        } else {
            weigh_experts<Logit, Weight, normalize>(logits, given, a.experts, a.top_k, lane, selected, weights);
        }
    }
    if (record) {
        __syncthreads();
        if (threadIdx.x == 0) {
            finish_record(record, valid, gridDim.x);
        }
    }
}

}  // namespace qmoe

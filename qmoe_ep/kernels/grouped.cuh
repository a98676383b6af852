// Grouped kernels: the products of any number of rows, each expert's weights read once for all its tokens.

#pragma once

#include "activation.cuh"
#include "grouped_stream.cuh"

namespace qmoe::grouped {

// FC1 (and FC3) with bias and activation: input [rows, hidden] to activated float [routes, pitch]. Offsets are those
// of the parts of shared memory, in bytes; the ring is at 0.
struct GateUpArguments {
    const void* input;
    const unsigned char* fc1_weights;
    const void* fc1_scales;
    const void* fc1_bias;
    const unsigned char* fc1_zero_points;
    const unsigned char* fc3_weights;
    const void* fc3_scales;
    const void* fc3_bias;
    const unsigned char* fc3_zero_points;
    const int* grouped_routes;  // as is the next one: see GroupArguments
    const GroupTile* tiles;
    const int* tile_count;
    float* activated;
    int top_k;
    int tokens_offset;
    int token_bytes;
    int slots_offset;
    int slots;
    GateScalars scalars;
};

// FC2 with bias: activated to contributions float [routes, hidden].
struct DownArguments {
    const float* activated;
    const unsigned char* fc2_weights;
    const void* fc2_scales;
    const void* fc2_bias;
    const unsigned char* fc2_zero_points;
    const int* grouped_routes;
    const GroupTile* tiles;
    const int* tile_count;
    float* contributions;
    int tokens_offset;
    int token_bytes;
    int slots_offset;
    int slots;
};

// Contributions to output [rows, hidden].
struct CombineArguments {
    const float* contributions;
    const int* route_experts;
    const float* route_weights;
    void* output;
    int rows;
    int top_k;
    int hidden;
};

template <class Bias>
__device__ __forceinline__ float bias_of(const void* bias, long long index) {
    if constexpr (kIsVoid<Bias>) {
        return 0.0f;
    } else {
        return load_scale(static_cast<const Bias*>(bias), index);
    }
}

// How many of eight rows from `first` on are below `size`, which is a multiple of a tile if Even.
template <bool Even>
__device__ __forceinline__ int rows_left(int first, int size) {
    return Even ? kHalfTile : min(max(size - first, 0), kHalfTile);
}

// The compile-time side of FC1. Inter is I; activated rows are Pitch floats apart.
template <class InputType, int InputBytes, class ElementType, int PartCount, class FormatType, class GateBiasType,
          class UpBiasType, Gating kind, Activation function, int Pitch, int GroupCount, int StageCount>
struct GateUp {
    using Input = InputType;
    using Element = ElementType;
    using Format = FormatType;
    using GateBias = GateBiasType;
    using UpBias = UpBiasType;
    static constexpr int kInputBytes = InputBytes;
    static constexpr int kParts = PartCount;
    static constexpr int kPitch = Pitch;
    static constexpr int kGroups = GroupCount;
    static constexpr int kStages = StageCount;
    static constexpr Gating kGating = kind;
    static constexpr Activation kActivation = function;
    static constexpr bool kGated = kind != Gating::kNone;
    static constexpr bool kFused = kind == Gating::kInterleaved || kind == Gating::kHalves;
    static constexpr int kInter = Format::kOutFeatures / (kFused ? 2 : 1);
    static constexpr int kUnitFeatures = kGated ? kTileRows : 2 * kTileRows;
    static constexpr int kUnits = (kInter + kUnitFeatures - 1) / kUnitFeatures;
    static constexpr bool kEven = kInter % kUnitFeatures == 0;
    static constexpr int kRowStride = kind == Gating::kInterleaved ? 2 : 1;

    const GateUpArguments& a;

    // Row of FC1 or FC3 for a feature, of its gate or its up half.
    static __device__ __forceinline__ int row_of(int feature, int up) {
        return kind == Gating::kInterleaved ? 2 * feature + up : kind == Gating::kHalves ? up * kInter + feature : feature;
    }

    __device__ __forceinline__ TileRows rows(int expert, int unit, int tile) const {
        const int first = unit * kUnitFeatures + (kGated ? 0 : tile * kTileRows), up = kGated ? tile : 0;
        return TileRows{expert,
                        row_of(first, up),
                        row_of(first + kHalfTile, up),
                        kRowStride,
                        rows_left<kEven>(first, kInter),
                        rows_left<kEven>(first + kHalfTile, kInter)};
    }

    __device__ __forceinline__ TileMatrices matrices(int tile) const {
        const bool third = kind == Gating::kThird && tile == 1;
        const Operands own{third ? a.fc3_weights : a.fc1_weights,
                           static_cast<const unsigned char*>(third ? a.fc3_scales : a.fc1_scales),
                           third ? a.fc3_zero_points : a.fc1_zero_points};
        return TileMatrices{own, own};
    }

    __device__ __forceinline__ void stage(const int* routes, int count, int step, int steps, unsigned char* target,
                                          int run_bytes) const {
        const Input* input = static_cast<const Input*>(a.input);
        const int top_k = a.top_k;
        const auto row = [=](int token) {
            return input + static_cast<long long>(routes[token] / top_k) * Format::kInFeatures;
        };
        stage_group<Format, kParts, kInputBytes, Input>(row, count, step, steps, target, run_bytes);
    }

    // Bias, activation and store of the sums of a lane's rows (quad g of each tile) of two tokens of a group.
    __device__ __forceinline__ void finish(const float (&total)[2][4], int expert, int unit, int g, const int (&routes)[2]) const {
#pragma unroll
        for (int tile = 0; tile < (kGated ? 1 : 2); ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int feature = unit * kUnitFeatures + tile * kTileRows + half * kHalfTile + g;
                if (!kEven && feature >= kInter) {
                    continue;
                }
                const long long base = static_cast<long long>(expert) * Format::kOutFeatures;
                const float bias = bias_of<GateBias>(a.fc1_bias, base + row_of(feature, 0));
                float up_bias = 0.0f;
                if constexpr (kGated) {
                    up_bias = bias_of<UpBias>(kFused ? a.fc1_bias : a.fc3_bias, base + row_of(feature, 1));
                }
#pragma unroll
                for (int token = 0; token < 2; ++token) {
                    float value = total[tile][2 * half + token] + bias;
                    if constexpr (kGated) {
                        value = activate_gated(value, total[1][2 * half + token] + up_bias, a.scalars);
                    } else {
                        value = activate<kActivation>(value);
                    }
                    if (routes[token] >= 0) {
                        a.activated[static_cast<long long>(routes[token]) * kPitch + feature] = value;
                    }
                }
            }
        }
    }
};

// The compile-time side of FC2.
template <class ElementType, int PartCount, class FormatType, class BiasType, int Pitch, int GroupCount, int StageCount>
struct Down {
    using Element = ElementType;
    using Format = FormatType;
    using Bias = BiasType;
    static constexpr int kParts = PartCount;
    static constexpr int kPitch = Pitch;
    static constexpr int kGroups = GroupCount;
    static constexpr int kStages = StageCount;
    static constexpr int kHidden = Format::kOutFeatures;
    static constexpr int kUnitFeatures = 2 * kTileRows;
    static constexpr int kUnits = (kHidden + kUnitFeatures - 1) / kUnitFeatures;
    static constexpr bool kEven = kHidden % kUnitFeatures == 0;
    static constexpr int kRowStride = 1;

    const DownArguments& a;

    __device__ __forceinline__ TileRows rows(int expert, int unit, int tile) const {
        const int first = unit * kUnitFeatures + tile * kTileRows;
        return TileRows{expert, first, first + kHalfTile, 1, rows_left<kEven>(first, kHidden),
                        rows_left<kEven>(first + kHalfTile, kHidden)};
    }

    __device__ __forceinline__ TileMatrices matrices(int) const {
        const Operands own{a.fc2_weights, static_cast<const unsigned char*>(a.fc2_scales), a.fc2_zero_points};
        return TileMatrices{own, own};
    }

    __device__ __forceinline__ void stage(const int* routes, int count, int step, int steps, unsigned char* target,
                                          int run_bytes) const {
        const float* activated = a.activated;
        const auto row = [=](int token) { return activated + static_cast<long long>(routes[token]) * kPitch; };
        stage_group<Format, kParts, kFresh, float>(row, count, step, steps, target, run_bytes);
    }

    __device__ __forceinline__ void finish(const float (&total)[2][4], int expert, int unit, int g, const int (&routes)[2]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int feature = unit * kUnitFeatures + i * kHalfTile + g;
            if (!kEven && feature >= kHidden) {
                continue;
            }
            const float bias = bias_of<Bias>(a.fc2_bias, static_cast<long long>(expert) * kHidden + feature);
#pragma unroll
            for (int token = 0; token < 2; ++token) {
                if (routes[token] >= 0) {
                    a.contributions[static_cast<long long>(routes[token]) * kHidden + feature] =
                        total[i / 2][i % 2 * 2 + token] + bias;
                }
            }
        }
    }
};

// What both products do with a block's share: fill the warp's ring, then for every segment stage the tokens' activations,
// stream the weights, and finish the units. A unit whose steps are spread over several warps is finished by the first
// of them, which adds what the others have left in shared memory, in order.
template <class L, class Ready>
__device__ __forceinline__ void run_share(const L& work, const Share& share, const int* grouped_routes, int tokens_offset,
                                          int slots_offset, Ready ready) {
    using F = typename L::Format;
    using Sums = UnitSums<F, typename L::Element, L::kParts, L::kGroups>;
    constexpr int kGroupBytes = L::kParts * Sums::kPartBytes;
    constexpr int kVector = F::kLaneRun == 4 ? 8 : 16;
    constexpr int kStageBytes = 2 * F::kStageBytes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    char* shared = decode::shared_memory();
    unsigned char* tokens = reinterpret_cast<unsigned char*>(shared + tokens_offset);
    float* slots = reinterpret_cast<float*>(shared + slots_offset);
    const unsigned ring = decode::shared_address(shared) + warp * (L::kStages * kStageBytes);
    unsigned stage = ring;
    UnitCopies<L> copies{work, share, ring, warp, warps, lane};
    copies.template begin<L::kStages>();
    ready();

    Sums sums;
#pragma unroll 1
    for (int position = share.begin; position < share.end;) {
        const Segment segment = segment_at<L>(share, position, warps);
        const Span span(segment, warp, warps);
        const int* routes = grouped_routes + segment.first;
        const int run_bytes = segment.groups * kGroupBytes;
        const auto slot = [&](int unit, int of) {
            return slots + (segment.chunks > 1 ? unit + of : of) * (segment.groups * 256);
        };
        const auto finish = [&](int unit) {
            sums.unscale();
#pragma unroll
            for (int group = 0; group < L::kGroups; ++group) {
                if (group < segment.groups) {
                    int own[2];
#pragma unroll
                    for (int token = 0; token < 2; ++token) {
                        const int index = group * kGroupTokens + lane % 4 * 2 + token;
                        own[token] = index < segment.count ? load_fresh(routes + index) : -1;
                    }
                    work.finish(sums.total[group], segment.expert, segment.unit + unit, lane / 4, own);
                }
            }
        };
        int open = -1;  // the unit that this warp begins and others go on with
#pragma unroll 1
        for (int chunk = 0; chunk < segment.chunks; ++chunk) {
            const int base = chunk * segment.chunk_steps;
            const int steps = min(segment.chunk_steps, F::kRowSteps - base);
            __syncthreads();
#pragma unroll 1
            for (int group = 0; group < segment.groups; ++group) {
                work.stage(routes + group * kGroupTokens, segment.count - group * kGroupTokens, base, steps,
                           tokens + group * kGroupBytes, run_bytes);
            }
            __syncthreads();
#pragma unroll 1
            for (int unit = span.first / span.chunk_steps; unit * span.chunk_steps < span.last; ++unit) {
                const int begin = span.begin_of(unit), end = span.end_of(unit);
                if (chunk == 0) {
                    sums.clear();
                } else {
                    sums.clear();
                    sums.add(slot(unit, warp), lane, segment.groups);
                }
                Windows windows[2] = {};
                if constexpr (F::kScaleWindow || F::kZeroPoints) {
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile) {
                        windows[tile] = decode::windows_of<F>(
                            work.matrices(tile), work.rows(segment.expert, segment.unit + unit, tile), lane);
                    }
                }
                unsigned place = decode::shared_address(tokens) + begin * F::kRuns * run_bytes + lane * kVector;
#pragma unroll 1
                for (int step = begin; step < min(end, steps); ++step) {
                    decode::wait_copies<L::kStages - 1>();
                    __syncwarp();
                    sums.add(stage, base + step, lane, windows, place, segment.groups);
                    __syncwarp();
                    copies.next(stage);
                    stage = stage == ring + (L::kStages - 1) * kStageBytes ? ring : stage + kStageBytes;
                    place += F::kRuns * run_bytes;
                }
                if (chunk + 1 < segment.chunks || begin > 0) {
                    sums.store(slot(unit, warp), lane, segment.groups);
                } else if (end < span.chunk_steps) {
                    open = unit;
                } else {
                    finish(unit);
                }
            }
        }
        __syncthreads();
        if (open >= 0) {
            const int total = segment.units * segment.chunk_steps;
            for (int other = warp + 1; other < warps && part_start(total, other, warps) < (open + 1) * segment.chunk_steps;
                 ++other) {
                if (part_start(total, other + 1, warps) > part_start(total, other, warps)) {
                    sums.add(slot(open, other), lane, segment.groups);
                }
            }
            finish(open);
        }
        position += segment.units;
    }
}

template <class L, class Arguments>
__device__ __forceinline__ Share share_of(const Arguments& a) {
    const int units = load_fresh(a.tile_count) * L::kUnits;
    return Share{a.tiles, part_start(units, blockIdx.x, gridDim.x), part_start(units, blockIdx.x + 1, gridDim.x),
                 a.token_bytes, a.slots};
}

// A block owns a contiguous share of the units (tile of routes, 16 gated or 32 plain features): it reads its tokens'
// inputs and its units' weights, each once, and writes activated. One wave of blocks, each with as many bytes in flight
// as its shared memory holds; bound by reading the weights, with many tokens of an expert by the products.
template <class L>
__device__ __forceinline__ void gate_up(const GateUpArguments& a) {
    decode::wait_for_predecessor();
    decode::allow_successor();
    run_share(L{a}, share_of<L>(a), a.grouped_routes, a.tokens_offset, a.slots_offset, [] {});
}

// The same of units (tile of routes, 32 features) of FC2: reads activated, writes contributions. The tiles were there
// before the kernel before this one began, so that weights are under way before its activations are.
template <class L>
__device__ __forceinline__ void down(const DownArguments& a) {
    run_share(L{a}, share_of<L>(a), a.grouped_routes, a.tokens_offset, a.slots_offset,
              [] { decode::wait_for_predecessor(); });
    decode::allow_successor();
}

// A thread owns a feature of a row: it reads the row's contributions and weights, sums them in slot order, and writes the
// output, rounded once. Rows without experts are left as they are. Bound by the reading.
template <class Output>
__device__ __forceinline__ void combine(const CombineArguments& a) {
    decode::wait_for_predecessor();
    const int tiles = (a.hidden + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
    const long long items = static_cast<long long>(a.rows) * tiles;
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const long long row = item / tiles;
        const int feature = static_cast<int>(item % tiles) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
        const long long first = row * a.top_k;
        if (feature >= a.hidden || load_fresh(a.route_experts + first) < 0) {
            continue;
        }
        float total = 0.0f;
#pragma unroll 8
        for (int slot = 0; slot < a.top_k; ++slot) {
            total = fmaf(a.route_weights[first + slot], a.contributions[(first + slot) * a.hidden + feature], total);
        }
        static_cast<Output*>(a.output)[row * a.hidden + feature] = from_float<Output>(total);
    }
}

}  // namespace qmoe::grouped

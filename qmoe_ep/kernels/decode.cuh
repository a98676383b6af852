// Decode kernels: one row through its experts in two launches.

#pragma once

#include "activation.cuh"
#include "decode_activations.cuh"
#include "decode_route.cuh"

namespace qmoe::decode {

// Routing, FC1 (and FC3) with bias and activation: input [1, hidden] to activated float [top_k, activated_pitch], zero
// past a slot's features. Offsets are those of the parts of shared memory, in bytes; the ring is at 0.
struct GateUpArguments {
    const void* router_probs;
    const void* router_weights;
    const int* valid_rows;
    void* telemetry;
    const void* input;
    const unsigned char* fc1_weights;
    const void* fc1_scales;
    const void* fc1_bias;
    const unsigned char* fc1_zero_points;
    const unsigned char* fc3_weights;
    const void* fc3_scales;
    const void* fc3_bias;
    const unsigned char* fc3_zero_points;
    float* activated;
    int experts;
    int top_k;
    int pieces_offset;
    int factors_offset;
    int partials_offset;
    int selected_offset;
    int activated_pitch;
    GateScalars scalars;
};

// Routing, FC2 with bias, and the weighted sum over the slots: activated to output [1, hidden].
struct DownArguments {
    const void* router_probs;
    const void* router_weights;
    const int* valid_rows;
    const float* activated;
    const unsigned char* fc2_weights;
    const void* fc2_scales;
    const void* fc2_bias;
    const unsigned char* fc2_zero_points;
    void* output;
    int experts;
    int top_k;
    int pieces_offset;
    int factors_offset;
    int partials_offset;
    int selected_offset;
    int weights_offset;
    int results_offset;
};

template <class LogitType, class WeightType, bool kNormalizeWeights, int kKeysPerLane>
struct Routing {
    using Logit = LogitType;
    using Weight = WeightType;
    static constexpr bool kNormalize = kNormalizeWeights;
    static constexpr int kKeys = kKeysPerLane;
};

// The format's rows are hidden features; those of FC1 are inter, or twice as many where gate and up are fused.
template <class RoutingType, class InputType, int InputBytes, class StreamFormatType, class GateBiasType, class UpBiasType,
          Gating kind, Activation function, int StageCount, int StagesAhead>
struct GateUp {
    using Routing = RoutingType;
    using Input = InputType;
    using Format = StreamFormatType;
    using GateBias = GateBiasType;
    using UpBias = UpBiasType;
    static constexpr int kInputBytes = InputBytes;
    static constexpr bool kSplit = !kSameType<InputType, Float16>;
    static constexpr Gating kGating = kind;
    static constexpr Activation kActivation = function;
    static constexpr int kStages = StageCount;
    static constexpr int kAhead = StagesAhead;  // begun before the activations are staged
    static constexpr bool kGated = kind != Gating::kNone;
    static constexpr bool kFused = kind == Gating::kInterleaved || kind == Gating::kHalves;
    static constexpr int kInter = Format::kOutFeatures / (kFused ? 2 : 1);
    static constexpr int kTileFeatures = kGated ? kHalfTile : kTileRows;
    static constexpr int kTiles = (kInter + kTileFeatures - 1) / kTileFeatures;
};

// A block owns a whole number of tiles of output rows, or, where that is uneven, of half tiles.
template <class RoutingType, class OutputType, class StreamFormatType, class BiasType, int StageCount, bool HalfTiles>
struct Down {
    using Routing = RoutingType;
    using Output = OutputType;
    using Format = StreamFormatType;
    using Bias = BiasType;
    static constexpr int kStages = StageCount;
    static constexpr bool kHalfTiles = HalfTiles;
    static constexpr int kShareRows = HalfTiles ? kHalfTile : kTileRows;
    static constexpr int kShares = (Format::kOutFeatures + kShareRows - 1) / kShareRows;
};

// The part of `total` that `index` of `count` owns: from part_start(index) to part_start(index + 1). The product of
// total and count is below 2^31.
__device__ __forceinline__ int part_start(int total, int index, int count) {
    return static_cast<unsigned>(total) * static_cast<unsigned>(index) / static_cast<unsigned>(count);
}

// A sequence of `steps` over the warps of a block, as many to each, the last ones perhaps fewer or none.
struct WarpShares {
    int steps;
    int size;
    float inverse;

    __device__ __forceinline__ WarpShares(int total, int warps)
        : steps(total), size((total + warps - 1) / warps), inverse(1.0f / static_cast<float>(size)) {}
    __device__ __forceinline__ int first(int warp) const { return min(warp * size, steps); }
    // The warp that has a step; exact below 2^20 steps.
    __device__ __forceinline__ int warp_of(int step) const {
        return static_cast<int>((static_cast<float>(step) + 0.5f) * inverse);
    }
};

// Sums of units in shared memory: a warp's part of unit u is partial u + warp, of 16 rows.
__device__ __forceinline__ float collect(const float* partials, int unit, int row, int unit_steps, const WarpShares& shares) {
    float sum = 0.0f;
    const int end = shares.warp_of((unit + 1) * unit_steps - 1);
    for (int warp = shares.warp_of(unit * unit_steps); warp <= end; ++warp) {
        sum += partials[(unit + warp) * kTileRows + row];
    }
    return sum;
}

template <class Bias>
__device__ __forceinline__ float bias_of(const void* bias, long long index) {
    if constexpr (kIsVoid<Bias>) {
        return 0.0f;
    } else {
        return load_scale(static_cast<const Bias*>(bias), index);
    }
}

// How many of eight rows from `first` on are below `size`, which is a multiple of eight if Even.
template <bool Even>
__device__ __forceinline__ int rows_left(int first, int size) {
    return Even ? kHalfTile : min(max(size - first, 0), kHalfTile);
}

template <class L>
struct GateUpWork {
    using F = typename L::Format;
    using P = Pieces<F, L::kSplit>;
    static constexpr int kRowStride = L::kGating == Gating::kInterleaved ? 2 : 1;
    static constexpr bool kEven = L::kInter % L::kTileFeatures == 0;
    const int* selected;
    unsigned pieces;
    unsigned factor_values;
    float* partials;
    int first_unit;
    int warp;

    __device__ __forceinline__ int feature(int unit) const { return (first_unit + unit) % L::kTiles * L::kTileFeatures; }
    __device__ __forceinline__ int slot(int unit) const { return (first_unit + unit) / L::kTiles; }

    __device__ __forceinline__ TileRows tile(int, int unit) const {
        const int f = feature(unit), expert = selected[slot(unit)];
        const int low_count = rows_left<kEven>(f, L::kInter);
        if constexpr (L::kGating == Gating::kInterleaved) {
            return TileRows{expert, 2 * f, 2 * f + 1, 2, low_count, low_count};
        } else if constexpr (L::kGating == Gating::kHalves) {
            return TileRows{expert, f, L::kInter + f, 1, low_count, low_count};
        } else if constexpr (L::kGating == Gating::kThird) {
            return TileRows{expert, f, f, 1, low_count, low_count};
        } else {
            return TileRows{expert, f, f + kHalfTile, 1, low_count, rows_left<kEven>(f + kHalfTile, L::kInter)};
        }
    }

    __device__ __forceinline__ unsigned piece(int, int step, int lane) const {
        const int lower = L::kSplit ? (lane / 4 & 1) * 16 : 0;
        return pieces + (4 * step + lane % 4) * P::kBytes + lower;
    }

    __device__ __forceinline__ unsigned factors(int, int step, int lane) const {
        return factor_values + (4 * step + lane % 4) * P::kFactorsBytes;
    }

    __device__ __forceinline__ void emit(int, int unit, int row, float low, float high) const {
        float* partial = partials + (unit + warp) * kTileRows;
        partial[row] = low;
        partial[row + kHalfTile] = high;
    }
};

// Bias and activation of a block's sums, and zeros behind the features of a slot whose last tile it has.
template <class L>
__device__ __forceinline__ void finish_gate_up(const GateUpArguments& a, const GateUpWork<L>& work, const WarpShares& shares,
                                               int units) {
    using F = typename L::Format;
    for (int index = threadIdx.x; index < units * L::kTileFeatures; index += blockDim.x) {
        const int unit = index / L::kTileFeatures, row = index % L::kTileFeatures;
        const TileRows tile = work.tile(0, unit);
        const int feature = work.feature(unit) + row;
        const bool present = feature < L::kInter;
        const long long own = row_index<F>(tile.expert, tile_row(tile, row).row);
        float value = collect(work.partials, unit, row, F::kRowSteps, shares);
        if (present) {
            value += bias_of<typename L::GateBias>(a.fc1_bias, own);
        }
        if constexpr (L::kGated) {
            float up = collect(work.partials, unit, row + kHalfTile, F::kRowSteps, shares);
            if (present) {
                const long long other = row_index<F>(tile.expert, tile_row(tile, row + kHalfTile).row);
                up += bias_of<typename L::UpBias>(L::kFused ? a.fc1_bias : a.fc3_bias, other);
            }
            value = activate_gated(value, up, a.scalars);
        } else {
            value = activate<L::kActivation>(value);
        }
        float* activated = a.activated + static_cast<long long>(work.slot(unit)) * a.activated_pitch;
        if (present) {
            activated[feature] = value;
        }
        if (work.feature(unit) + L::kTileFeatures >= L::kInter) {
            for (int pad = L::kInter + row; pad < a.activated_pitch; pad += L::kTileFeatures) {
                activated[pad] = 0.0f;
            }
        }
    }
}

// What an armed telemetry record takes, by one warp of the call.
template <class Logit>
__device__ __forceinline__ void record_selected(const GateUpArguments& a, const int* selected, int lane) {
    RouteRecord* record = open_record(a.telemetry, a.experts, a.top_k);
    if (record) {
        record_choice(record, 0, 1, static_cast<const Logit*>(a.router_probs), selected, lane);
        __syncwarp();
        if (lane == 0) {
            finish_record(record, 1, 1);
        }
    }
}

// A block owns a contiguous share of the units (slot, tile of 8 gated or 16 plain features). Each of its warps selects
// the row's experts, stages its part of the row's activations and streams an equal number of steps of the units'
// weights; bias and activation are applied to the sums. The next kernel may start once the first loads are under way:
// sooner, its loads would hold these up, and later it would begin too late. Reads logits, the row and its units'
// weights; writes activated. One wave of blocks, each with as many bytes in flight as helps; bound by reading the weights.
template <class L>
__device__ __forceinline__ void gate_up(const GateUpArguments& a) {
    using F = typename L::Format;
    using Input = typename L::Input;
    using Logit = typename L::Routing::Logit;
    constexpr int kEights = F::kRowSteps * (F::kStepCodes / 8);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    char* shared = shared_memory();
    unsigned char* pieces = reinterpret_cast<unsigned char*>(shared + a.pieces_offset);
    unsigned char* factors = reinterpret_cast<unsigned char*>(shared + a.factors_offset);
    float* partials = reinterpret_cast<float*>(shared + a.partials_offset);
    int* selected = reinterpret_cast<int*>(shared + a.selected_offset) + warp * a.top_k;

    const int first_unit = part_start(a.top_k * L::kTiles, blockIdx.x, gridDim.x);
    const int units = part_start(a.top_k * L::kTiles, blockIdx.x + 1, gridDim.x) - first_unit;
    const WarpShares shares(units * F::kRowSteps, warps);
    const Operands fc1{a.fc1_weights, static_cast<const unsigned char*>(a.fc1_scales), a.fc1_zero_points};
    const Operands fc3{a.fc3_weights, static_cast<const unsigned char*>(a.fc3_scales), a.fc3_zero_points};
    const TileMatrices matrices{fc1, L::kGating == Gating::kThird ? fc3 : fc1};
    const GateUpWork<L> work{selected, shared_address(pieces), shared_address(factors), partials, first_unit, warp};
    WarpStream<F, L::kSplit, L::kStages, GateUpWork<L>> stream{
        matrices, work, shared_address(shared) + warp * (L::kStages * F::kStageBytes), shares.first(warp),
        shares.first(warp + 1), 1, lane};

    wait_for_predecessor();
    if (a.valid_rows && load_fresh(a.valid_rows) < 1) {
        return;
    }
    const auto* input = static_cast<const Input*>(a.input);
    float values[8];
    load_eight<L::kInputBytes, F::kInFeatures>(input, threadIdx.x, values);
    select_by_warp<L::Routing::kKeys>(static_cast<const Logit*>(a.router_probs), a.experts, a.top_k, lane, selected);
    __syncwarp();
    // Copies fill the pipe that stores to shared memory go through: a few are to be under way meanwhile, no more.
    stream.begin();
    stream.fill(0, L::kAhead);
    bool wild = false;
    for (int index = threadIdx.x; index - lane < kEights; index += blockDim.x) {
        if (index >= static_cast<int>(blockDim.x)) {
            load_eight<L::kInputBytes, F::kInFeatures>(input, index, values);
        }
        wild |= store_eight<F, L::kSplit>(values, pieces, factors, index, index < kEights);
    }
    wild = __syncthreads_or(wild);
    stream.fill(L::kAhead, L::kStages);
    allow_successor();
    if (blockIdx.x == 0 && warp == warps - 1) {  // none has less to do
        record_selected<Logit>(a, selected, lane);
    }
    if (wild) {
        stream.template run<true>();
    } else {
        stream.template run<false>();
    }
    __syncthreads();
    finish_gate_up<L>(a, work, shares, units);
}

template <class L>
struct DownWork {
    using F = typename L::Format;
    using P = Pieces<F, true>;
    static constexpr int kRowStride = 1;
    static constexpr bool kEven = !L::kHalfTiles && F::kOutFeatures % kTileRows == 0;
    const int* selected;
    unsigned pieces;
    unsigned factor_values;
    float* partials;
    int first_row;
    int last_row;
    int warp;
    int repeat_partials;

    __device__ __forceinline__ TileRows tile(int repeat, int unit) const {
        const int row = first_row + repeat * kTileRows;
        return TileRows{selected[unit], row, row + kHalfTile, 1, rows_left<kEven>(row, last_row),
                        rows_left<kEven>(row + kHalfTile, last_row)};
    }

    __device__ __forceinline__ unsigned piece(int unit, int step, int lane) const {
        return pieces + (4 * (unit * F::kRowSteps + step) + lane % 4) * P::kBytes + (lane / 4 & 1) * 16;
    }

    __device__ __forceinline__ unsigned factors(int unit, int step, int lane) const {
        return factor_values + (4 * (unit * F::kRowSteps + step) + lane % 4) * P::kFactorsBytes;
    }

    __device__ __forceinline__ void emit(int repeat, int unit, int row, float low, float high) const {
        float* partial = partials + (repeat * repeat_partials + unit + warp) * kTileRows;
        partial[row] = low;
        partial[row + kHalfTile] = high;
    }
};

// The weighted sum over the slots, in slot order, of a block's sums with bias.
template <class L>
__device__ __forceinline__ void finish_down(const DownArguments& a, const DownWork<L>& work, const WarpShares& shares,
                                            const float* weights, float* results) {
    using F = typename L::Format;
    const int rows = work.last_row - work.first_row;
    const int padded = (rows + kTileRows - 1) / kTileRows * kTileRows;
    for (int index = threadIdx.x; index < padded * a.top_k; index += blockDim.x) {
        const int row = index % kTileRows, tile = index / kTileRows;
        const int repeat = tile / a.top_k, slot = tile - repeat * a.top_k;
        const int feature = work.first_row + repeat * kTileRows + row;
        const float* own = work.partials + repeat * work.repeat_partials * kTileRows;
        float value = collect(own, slot, row, F::kRowSteps, shares);
        if (feature < work.last_row) {
            value += bias_of<typename L::Bias>(a.fc2_bias, row_index<F>(work.selected[slot], feature));
        }
        results[index] = value;
    }
    __syncthreads();
    for (int index = threadIdx.x; index < rows; index += blockDim.x) {
        const float* own = results + index / kTileRows * a.top_k * kTileRows + index % kTileRows;
        float total = 0.0f;
        for (int slot = 0; slot < a.top_k; ++slot) {
            total = fmaf(weights[slot], own[slot * kTileRows], total);
        }
        static_cast<typename L::Output*>(a.output)[work.first_row + index] = from_float<typename L::Output>(total);
    }
}

// A block owns a contiguous share of the output rows, for all slots: it selects and weighs the row's experts, begins to
// stream its rows' weights, and only then waits for the activated values, of which each warp stages those of its own
// steps. The slots' sums are weighed and added in slot order. Reads logits, activated and its rows' weights; writes the
// output. One wave of blocks; bound by reading the weights, the first of which are in flight while the kernel before
// this one ends.
template <class L>
__device__ __forceinline__ void down(const DownArguments& a) {
    using F = typename L::Format;
    using R = typename L::Routing;
    constexpr int kStepEights = F::kStepCodes / 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    char* shared = shared_memory();
    unsigned char* pieces = reinterpret_cast<unsigned char*>(shared + a.pieces_offset);
    unsigned char* factors = reinterpret_cast<unsigned char*>(shared + a.factors_offset);
    float* partials = reinterpret_cast<float*>(shared + a.partials_offset);
    int* selected = reinterpret_cast<int*>(shared + a.selected_offset);
    float* weights = reinterpret_cast<float*>(shared + a.weights_offset);
    float* results = reinterpret_cast<float*>(shared + a.results_offset);

    allow_successor();
    if (a.valid_rows && *a.valid_rows < 1) {
        return;
    }
    const auto* logits = static_cast<const typename R::Logit*>(a.router_probs);
    if (warp == 0) {
        select_by_warp<R::kKeys>(logits, a.experts, a.top_k, lane, selected);
    }
    __syncthreads();

    const int first_row = part_start(L::kShares, blockIdx.x, gridDim.x) * L::kShareRows;
    const int last_row = min(part_start(L::kShares, blockIdx.x + 1, gridDim.x) * L::kShareRows, F::kOutFeatures);
    const WarpShares shares(a.top_k * F::kRowSteps, warps);
    const int first = shares.first(warp), last = shares.first(warp + 1);
    const Operands fc2{a.fc2_weights, static_cast<const unsigned char*>(a.fc2_scales), a.fc2_zero_points};
    const TileMatrices matrices{fc2, fc2};
    const DownWork<L> work{selected, shared_address(pieces), shared_address(factors), partials, first_row, last_row, warp,
                           a.top_k + warps - 1};
    const int repeats = (last_row - first_row + kTileRows - 1) / kTileRows;
    WarpStream<F, true, L::kStages, DownWork<L>> stream{
        matrices, work, shared_address(shared) + warp * (L::kStages * F::kStageBytes), first, last, repeats, lane};
    stream.begin();
    stream.fill(0, L::kStages);
    if (warp == warps - 1) {
        weigh_experts<typename R::Logit, typename R::Weight, R::kNormalize>(logits, a.router_weights, a.experts, a.top_k, lane,
                                                                            selected, weights);
    }

    wait_for_predecessor();
    const bool wild = stage_fresh<F>(a.activated, first * kStepEights, (last - first) * kStepEights, pieces, factors, lane);
    if (__any_sync(kAllLanes, wild)) {
        stream.template run<true>();
    } else {
        stream.template run<false>();
    }
    __syncthreads();
    finish_down<L>(a, work, shares, weights, results);
}

}  // namespace qmoe::decode

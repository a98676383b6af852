// Decode kernels: one row through its experts in two launches.

#pragma once

#include "activation.cuh"
#include "decode_activations.cuh"
#include "decode_route.cuh"

namespace qmoe::decode {

// Routing, FC1 (and FC3) with bias and activation: input [1, hidden] to activated float [top_k, inter]. Offsets are those
// of the parts of shared memory, in bytes; the ring is at 0.
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
          Gating kind, Activation function, int StageCount>
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
    static constexpr bool kGated = kind != Gating::kNone;
    static constexpr bool kFused = kind == Gating::kInterleaved || kind == Gating::kHalves;
    static constexpr int kInter = Format::kOutFeatures / (kFused ? 2 : 1);
    static constexpr int kTileFeatures = kGated ? kHalfTile : kTileRows;
    static constexpr int kTiles = (kInter + kTileFeatures - 1) / kTileFeatures;
};

template <class RoutingType, class OutputType, class StreamFormatType, class BiasType, int StageCount>
struct Down {
    using Routing = RoutingType;
    using Output = OutputType;
    using Format = StreamFormatType;
    using Bias = BiasType;
    static constexpr int kStages = StageCount;
    static constexpr int kTiles = (Format::kOutFeatures + kTileRows - 1) / kTileRows;
};

// The part of `total` that `index` of `count` owns: from part_start(index) to part_start(index + 1).
__device__ __forceinline__ int part_start(int total, int index, int count) {
    return static_cast<int>(static_cast<long long>(total) * index / count);
}

// The part that holds `element`.
__device__ __forceinline__ int part_of(int total, int element, int count) {
    return static_cast<int>((static_cast<long long>(element + 1) * count - 1) / total);
}

// Sums of units in shared memory: a warp's part of unit u is partial u + warp, of 16 rows.
__device__ __forceinline__ float collect(const float* partials, int unit, int row, int unit_steps, int steps, int warps) {
    float sum = 0.0f;
    const int end = part_of(steps, (unit + 1) * unit_steps - 1, warps);
    for (int warp = part_of(steps, unit * unit_steps, warps); warp <= end; ++warp) {
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

// A block owns a contiguous share of the units (slot, tile of 8 gated or 16 plain features): it selects the row's
// experts, stages the row's activations, streams its units' weights, each warp an equal number of steps, and applies
// bias and activation to the sums. Reads logits, the row and its units' weights; writes activated. One wave of blocks,
// each with as many bytes in flight as its shared memory holds; bound by reading the weights.
template <class L>
__device__ __forceinline__ void gate_up(const GateUpArguments& a) {
    using F = typename L::Format;
    using Input = typename L::Input;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    char* shared = shared_memory();
    unsigned char* pieces = reinterpret_cast<unsigned char*>(shared + a.pieces_offset);
    unsigned char* factors = reinterpret_cast<unsigned char*>(shared + a.factors_offset);
    float* partials = reinterpret_cast<float*>(shared + a.partials_offset);
    int* selected = reinterpret_cast<int*>(shared + a.selected_offset);

    wait_for_predecessor();
    allow_successor();
    if (a.valid_rows && *a.valid_rows < 1) {
        return;
    }
    if (warp == 0) {
        using Logit = typename L::Routing::Logit;
        select_by_warp<L::Routing::kKeys>(static_cast<const Logit*>(a.router_probs), a.experts, a.top_k, lane, selected);
        RouteRecord* record = blockIdx.x == 0 ? open_record(a.telemetry, a.experts, a.top_k) : nullptr;
        if (record) {
            record_choice(record, 0, 1, static_cast<const Logit*>(a.router_probs), selected, lane);
            __syncwarp();
            if (lane == 0) {
                finish_record(record, 1, 1);
            }
        }
    }
    bool wild = false;
    if (warp > 0 || warps == 1) {
        const int from = warps == 1 ? 0 : 32;
        wild = stage_row<F, L::kSplit, L::kInputBytes>(static_cast<const Input*>(a.input), 0,
                                                       F::kRowSteps * (F::kStepCodes / 8), pieces, factors,
                                                       threadIdx.x - from, blockDim.x - from);
    }
    wild = __syncthreads_or(wild);

    const int first_unit = part_start(a.top_k * L::kTiles, blockIdx.x, gridDim.x);
    const int units = part_start(a.top_k * L::kTiles, blockIdx.x + 1, gridDim.x) - first_unit;
    const int steps = units * F::kRowSteps;
    const Operands fc1{a.fc1_weights, static_cast<const unsigned char*>(a.fc1_scales), a.fc1_zero_points};
    const Operands fc3{a.fc3_weights, static_cast<const unsigned char*>(a.fc3_scales), a.fc3_zero_points};
    const TileMatrices matrices{fc1, L::kGating == Gating::kThird ? fc3 : fc1};
    const GateUpWork<L> work{selected, shared_address(pieces), shared_address(factors), partials, first_unit, warp};
    WarpStream<F, L::kSplit, L::kStages, GateUpWork<L>> stream{
        matrices, work, shared_address(shared) + warp * (L::kStages * F::kStageBytes), part_start(steps, warp, warps),
        part_start(steps, warp + 1, warps), 1, lane};
    stream.begin();
    if (wild) {
        stream.template run<true>();
    } else {
        stream.template run<false>();
    }
    __syncthreads();

    for (int index = threadIdx.x; index < units * L::kTileFeatures; index += blockDim.x) {
        const int unit = index / L::kTileFeatures, row = index % L::kTileFeatures;
        const TileRows tile = work.tile(0, unit);
        const int feature = work.feature(unit) + row;
        if (feature >= L::kInter) {
            continue;
        }
        const long long own = row_index<F>(tile.expert, tile_row(tile, row).row);
        float value = collect(partials, unit, row, F::kRowSteps, steps, warps) + bias_of<typename L::GateBias>(a.fc1_bias, own);
        if constexpr (L::kGated) {
            const long long other = row_index<F>(tile.expert, tile_row(tile, row + kHalfTile).row);
            const void* bias = L::kFused ? a.fc1_bias : a.fc3_bias;
            const float up = collect(partials, unit, row + kHalfTile, F::kRowSteps, steps, warps) +
                             bias_of<typename L::UpBias>(bias, other);
            value = activate_gated(value, up, a.scalars);
        } else {
            value = activate<L::kActivation>(value);
        }
        a.activated[static_cast<long long>(work.slot(unit)) * L::kInter + feature] = value;
    }
}

template <class L>
struct DownWork {
    using F = typename L::Format;
    using P = Pieces<F, true>;
    static constexpr int kRowStride = 1;
    static constexpr bool kEven = F::kOutFeatures % kTileRows == 0;
    const int* selected;
    unsigned pieces;
    unsigned factor_values;
    float* partials;
    int first_tile;
    int warp;
    int repeat_partials;

    __device__ __forceinline__ TileRows tile(int repeat, int unit) const {
        const int row = (first_tile + repeat) * kTileRows;
        return TileRows{selected[unit], row, row + kHalfTile, 1, rows_left<kEven>(row, F::kOutFeatures),
                        rows_left<kEven>(row + kHalfTile, F::kOutFeatures)};
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

// A block owns a contiguous share of the tiles of 16 output rows, for all slots: it selects and weighs the row's
// experts, begins to stream its tiles' weights, and only then waits for the activated values, of which each warp stages
// those of its own steps. The slots' sums are weighed and added in slot order. Reads logits, activated and its tiles'
// weights; writes the output. One wave of blocks; bound by reading the weights, the first of which are in flight while
// the kernel before this one ends.
template <class L>
__device__ __forceinline__ void down(const DownArguments& a) {
    using F = typename L::Format;
    using R = typename L::Routing;
    using P = Pieces<F, true>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    char* shared = shared_memory();
    unsigned char* pieces = reinterpret_cast<unsigned char*>(shared + a.pieces_offset);
    unsigned char* factors = reinterpret_cast<unsigned char*>(shared + a.factors_offset);
    float* partials = reinterpret_cast<float*>(shared + a.partials_offset);
    int* selected = reinterpret_cast<int*>(shared + a.selected_offset);
    float* weights = reinterpret_cast<float*>(shared + a.weights_offset);

    allow_successor();
    if (a.valid_rows && *a.valid_rows < 1) {
        return;
    }
    const auto* logits = static_cast<const typename R::Logit*>(a.router_probs);
    if (warp == 0) {
        select_by_warp<R::kKeys>(logits, a.experts, a.top_k, lane, selected);
    }
    __syncthreads();

    const int first_tile = part_start(L::kTiles, blockIdx.x, gridDim.x);
    const int repeats = part_start(L::kTiles, blockIdx.x + 1, gridDim.x) - first_tile;
    const int steps = a.top_k * F::kRowSteps;
    const int first = part_start(steps, warp, warps), last = part_start(steps, warp + 1, warps);
    const Operands fc2{a.fc2_weights, static_cast<const unsigned char*>(a.fc2_scales), a.fc2_zero_points};
    const TileMatrices matrices{fc2, fc2};
    const int repeat_partials = a.top_k + warps - 1;
    const DownWork<L> work{selected, shared_address(pieces), shared_address(factors), partials, first_tile, warp, repeat_partials};
    WarpStream<F, true, L::kStages, DownWork<L>> stream{
        matrices, work, shared_address(shared) + warp * (L::kStages * F::kStageBytes), first, last, repeats, lane};
    stream.begin();
    if (warp == warps - 1) {
        weigh_experts<typename R::Logit, typename R::Weight, R::kNormalize>(logits, a.router_weights, a.experts, a.top_k, lane,
                                                                            selected, weights);
    }

    wait_for_predecessor();
    bool wild = false;
    for (int unit = first / F::kRowSteps; unit * F::kRowSteps < last; ++unit) {
        const int begin = stream.begin_of(unit), position = unit * F::kRowSteps + begin;
        wild |= stage_row<F, true, kFresh>(a.activated + static_cast<long long>(unit) * F::kInFeatures,
                                           begin * (F::kStepCodes / 8), (stream.end_of(unit) - begin) * (F::kStepCodes / 8),
                                           pieces + position * 4 * P::kBytes, factors + position * 4 * P::kFactorsBytes, lane,
                                           32);
    }
    if (__any_sync(kAllLanes, wild)) {
        stream.template run<true>();
    } else {
        stream.template run<false>();
    }
    __syncthreads();

    for (int index = threadIdx.x; index < repeats * kTileRows; index += blockDim.x) {
        const int repeat = index / kTileRows, row = index % kTileRows;
        const int feature = (first_tile + repeat) * kTileRows + row;
        if (feature >= F::kOutFeatures) {
            continue;
        }
        const float* own = partials + repeat * repeat_partials * kTileRows;
        float total = 0.0f;
        for (int slot = 0; slot < a.top_k; ++slot) {
            const float value = collect(own, slot, row, F::kRowSteps, steps, warps) +
                                bias_of<typename L::Bias>(a.fc2_bias, row_index<F>(selected[slot], feature));
            total = fmaf(weights[slot], value, total);
        }
        static_cast<typename L::Output*>(a.output)[feature] = from_float<typename L::Output>(total);
    }
}

}  // namespace qmoe::decode

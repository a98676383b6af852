// Prefill on Hopper's tensor cores: grouped products of quantized weights and the tokens of each expert.
//
// A block multiplies 256 weight rows with up to 128 tokens. One warpgroup copies codes, scales and tokens into stages of
// shared memory; two others decode codes in registers and hand them to wgmma as its register operand, so that a weight is
// decoded once per tile of tokens. Blocks are persistent and walk a list of tiles that was made on the device. With many
// tokens the tensor cores bound it, with few the reading of the weights.

#pragma once

#include "prefill_multiply.cuh"

namespace qmoe::prefill {

// The compile-time side of FC1 and FC3, which have one format. The lower and upper rows of a warp are gate and up of
// the same features or, without gating, features 128 apart.
template <class HalfType, class MatrixWeights, class UpperBiasFormat, Gating kind, Activation function, int TileClass>
struct GateUp {
    using Half = HalfType;
    using Rows = MatrixWeights;
    using UpperFormat = UpperBiasFormat;  // as that of Rows but for the bias
    static constexpr int kClass = TileClass;
    static constexpr int kTokens = kClassTokens[TileClass];
    static constexpr Gating kGating = kind;
    static constexpr bool kGated = kind != Gating::kNone;
    static constexpr bool kFused = kind == Gating::kInterleaved || kind == Gating::kHalves;
    static constexpr Activation kActivation = function;
    static constexpr bool kChecked = kSameType<HalfType, Float16>;
};

// The kernels of a product's classes run beside each other. The first waits for what came before it, the others begin
// after it has; none ends before the one before it, so that whoever waits for the last waits for all.
template <int TileClass>
__device__ __forceinline__ void begin_class() {
    if constexpr (TileClass == 0) {
        dependent_wait();
    }
    dependent_launch();
}
template <int TileClass>
__device__ __forceinline__ void end_class() {
    if constexpr (TileClass > 0) {
        dependent_wait();
    }
}

// Note what the checked band saw of two routes' features: the first byte of a route says that one is large enough for
// f16, the second that one is small but not zero.
__device__ __forceinline__ void note_magnitudes(unsigned char* state, long long routes, int present, float first,
                                                float second) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float size = fabsf(i ? second : first);
        if (i < present && size >= kSmallActivated) {
            state[i] = 1;
        } else if (i < present && size > 0.0f) {
            state[routes + i] = 1;
        }
    }
}

// As activate_gated and activate, for results that are rounded to halves.
__device__ __forceinline__ float fast_gated(float gate, float up, const GateScalars& scalars) {
    gate = gate > scalars.limit ? scalars.limit : gate;
    up = up > scalars.limit ? scalars.limit : up;
    up = up < -scalars.limit ? -scalars.limit : up;
    return gate * fast_sigmoid(scalars.alpha * gate) * (up + scalars.beta);
}

template <Activation kind>
__device__ __forceinline__ float fast_activate(float x) {
    if constexpr (kind == Activation::kGelu) {
        return x * fast_sigmoid(x * fmaf(0.07135481627159701f, x * x, 1.5957691216057308f));
    } else if constexpr (kind == Activation::kSilu) {
        return x * fast_sigmoid(x);
    } else {
        return activate<kind>(x);
    }
}

// Bytes of an activated vector.
template <class L>
__device__ __forceinline__ int activated_bytes(int inter) {
    return L::kGated ? padded_steps(inter) * 2 * kStepInner : (inter + 2 * kStepInner - 1) / (2 * kStepInner) * 4 * kStepInner;
}

// Activate one band's features of a tile and write them.
template <class L>
__device__ __forceinline__ void store_activated(const GateUpArguments& a, const Work& work, int feature, int band,
                                                const float (&lower_terms)[2], const float (&upper_terms)[2],
                                                const float (&sums)[L::kTokens / 2],
                                                const Stages<typename L::Rows, L::kTokens>& stages) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    constexpr int kOutputs = L::kGated ? 1 : 2;
    const int row_bytes = activated_bytes<L>(a.inter);
    unsigned char* vectors = a.workspace + static_cast<long long>(work.first + g) * row_bytes +
                             kOutputs * work.row_tile * (2 * kStepInner) + band * 16 + c * 4;
#pragma unroll
    for (int j = 0; j < L::kTokens / 8; ++j) {
        if (8 * j >= work.count) {
            continue;
        }
#pragma unroll
        for (int half = 0; half < kOutputs; ++half) {
            float values[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float lower = fmaf(sums[4 * j + i], lower_terms[0], lower_terms[1]);
                const float upper = fmaf(sums[4 * j + 2 + i], upper_terms[0], upper_terms[1]);
                if constexpr (L::kGated) {
                    values[i] = fast_gated(lower, upper, a.scalars);
                } else {
                    values[i] = fast_activate<L::kActivation>(half ? upper : lower);
                }
                if (feature + kStepInner * half >= a.inter) {
                    values[i] = 0.0f;
                }
                if constexpr (L::kChecked) {
                    if (fabsf(values[i]) > 65504.0f && 8 * j + 2 * c + i < work.count) {
                        stages.note_unfit();
                    }
                }
            }
            if (L::kChecked && band == kCheckedBand) {
                note_magnitudes(a.route_state + work.first + 8 * j + 2 * c, a.routes, work.count - 8 * j - 2 * c,
                                values[0], values[1]);
            }
            const unsigned pair = transpose_halves(PairMath<typename L::Half>::pack(values[0], values[1]));
            if (8 * j + g < work.count) {
                *reinterpret_cast<unsigned*>(vectors + 8ll * j * row_bytes + half * (2 * kStepInner)) = pair;
            }
        }
    }
}

// The weight rows of FC1 that belong to a lane, and their features. Its second band has the features after those of
// the first, one each, because of the order of positions.
template <class L>
struct GateUpRows {
    int feature;  // of the first row; at least inter if there is none
    int first;
    int upper;  // rows from a lower to the upper row
    int band;   // rows from band to band

    // The features' order within a tile makes a position of every (band, g): see inner_of_position.
    __device__ __forceinline__ GateUpRows(int row_tile, int inter, int lane) {
        const int position = lane / 32 * (8 * kBands) + lane % 32 / 4;
        feature = (L::kGated ? 1 : 2) * kStepInner * row_tile + inner_of_position(position);
        const int own = min(feature, inter - 2);
        constexpr bool interleaved = L::kGating == Gating::kInterleaved;
        first = interleaved ? 2 * own : own;
        band = interleaved ? 2 : 1;
        upper = interleaved ? 1 : L::kGating == Gating::kHalves ? inter : L::kGating == Gating::kThird ? 0 : kStepInner;
    }

    // Which of the lane's rows there are.
    __device__ __forceinline__ unsigned present(int inter) const { return present_from(feature, inter); }
    // Of the lane that is fed with it, whose features are 16 further.
    __device__ __forceinline__ unsigned present_with(int inter) const { return present_from(feature + 16, inter); }

    __device__ __forceinline__ static unsigned present_from(int feature, int inter) {
        return feature >= inter ? 0u : L::kGated || feature + kStepInner < inter ? 0xfu : 0x5u;
    }
};

// FC1, and FC3, or FC1 again, whose rows are the upper ones.
template <class L>
__device__ __forceinline__ Matrix lower_matrix(const GateUpArguments& a) {
    return Matrix{a.fc1_weights, a.fc1_scales, a.fc1_bias, a.fc1_zero_points, L::kFused ? 2 * a.inter : a.inter,
                  a.hidden};
}
template <class L>
__device__ __forceinline__ Matrix upper_matrix(const GateUpArguments& a) {
    if constexpr (L::kGating == Gating::kThird) {
        return Matrix{a.fc3_weights, a.fc3_scales, a.fc3_bias, a.fc3_zero_points, a.inter, a.hidden};
    } else {
        return lower_matrix<L>(a);
    }
}

// A block owns (token tile, 256 weight rows) items: 128 intermediate features, gate and up, or 256 without gating. It
// reads the tile's rows of the input and the expert's codes, and writes the activated vectors.
template <class L>
__device__ __forceinline__ void gate_up(const GateUpArguments& a) {
    using W = typename L::Rows;
    using F = typename W::Format;
    using Half = typename L::Half;
    const auto stages = Stages<W, L::kTokens>::made();
    begin_class<L::kClass>();
    constexpr int kFeatures = (L::kGated ? 1 : 2) * kStepInner;
    const auto items = Items::of(a.tiles, a.tile_ends, L::kClass, (a.inter + kFeatures - 1) / kFeatures);
    const auto rows = [&](const Work& work, int lane) {
        const GateUpRows<L> own(work.row_tile, a.inter, lane);
        return lane_rows<F>(lower_matrix<L>(a), upper_matrix<L>(a), work.expert, own.first, own.upper, own.band,
                            own.present(a.inter) | own.present_with(a.inter) << 4, a.apart);
    };
    const auto token_row = [&](int entry) { return a.grouped_routes[entry] / a.top_k; };
    const auto store = [&](const Work& work, const Sums<L::kTokens>& sums) {
        const GateUpRows<L> own(work.row_tile, a.inter, threadIdx.x);
        const Matrix fc1 = lower_matrix<L>(a), further = upper_matrix<L>(a);
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
            const int lower = own.first + band * own.band;
            const int upper = own.present(a.inter) & 2u ? lower + own.upper : lower;
            const float lower_terms[2] = {row_scale<F>(fc1, work.expert, lower),
                                          load_bias<F>(fc1, work.expert, lower)};
            const float upper_terms[2] = {row_scale<F>(further, work.expert, upper),
                                          load_bias<typename L::UpperFormat>(further, work.expert, upper)};
            store_activated<L>(a, work, own.feature + band, static_cast<int>(threadIdx.x) / 32 * kBands + band,
                                       lower_terms, upper_terms, sums[band], stages);
        }
    };
    run_items<Half>(stages, items, a.workspace + a.tokens_offset, padded_steps(a.hidden) * 2 * kStepInner, a.hidden,
                       rows, token_row, store);
    if constexpr (L::kChecked) {
        stages.report(a.exact_tile_count, a.tile_ends[kClasses - 1] * a.exact_split);
    }
    end_class<L::kClass>();
}

// The compile-time side of FC2.
template <class HalfType, class MatrixWeights, int TileClass>
struct Down {
    using Half = HalfType;
    using Rows = MatrixWeights;
    static constexpr int kClass = TileClass;
    static constexpr int kTokens = kClassTokens[TileClass];
    static constexpr bool kChecked = kSameType<HalfType, Float16>;
};

// Write one band's 16 features of FC2, with scale and bias, for each route of a tile.
template <class F, int Tokens>
__device__ __forceinline__ void store_contributions(const DownArguments& a, const Matrix& fc2, const Work& work,
                                                    int feature, const float (&sums)[Tokens / 2]) {
    const float scales[2] = {row_scale<F>(fc2, work.expert, feature), row_scale<F>(fc2, work.expert, feature + 8)};
    const float biases[2] = {load_bias<F>(fc2, work.expert, feature), load_bias<F>(fc2, work.expert, feature + 8)};
    // Lane l of the warp has routes l, l + 32, …, so that they are read side by side.
    const int lane = threadIdx.x % 32;
    int routes[Tokens / 32];
#pragma unroll
    for (int i = 0; i < Tokens / 32; ++i) {
        routes[i] = 32 * i + lane < work.count ? a.grouped_routes[work.first + 32 * i + lane] : 0;
    }
#pragma unroll
    for (int j = 0; j < Tokens / 8; ++j) {
        if (8 * j >= work.count) {
            continue;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = 8 * j + 2 * (lane % 4) + i;
            const long long route = __shfl_sync(kAllLanes, routes[j / 4], token % 32);
            if (token < work.count) {
                float* to = a.contributions + route * a.hidden + feature;
                to[0] = fmaf(sums[4 * j + i], scales[0], biases[0]);
                to[8] = fmaf(sums[4 * j + 2 + i], scales[1], biases[1]);
            }
        }
    }
}

// The first weight row of a lane of FC2; hidden is a multiple of 16, so a band's rows are all there or none is.
__device__ __forceinline__ int down_row(int row_tile, int lane) {
    return kTileRows * row_tile + lane / 32 * (16 * kBands) + lane % 32 / 4;
}

// Whether f16 held what the activated features of an entry of grouped_routes were: a large one was seen, or all are zero.
__device__ __forceinline__ bool route_fits(const DownArguments& a, int entry) {
    return a.route_state[entry] ||
           (a.zero_rows[a.grouped_routes[entry] / a.top_k] && !a.route_state[static_cast<long long>(a.routes) + entry]);
}

// A block owns (token tile, 256 weight rows) items: it reads the tile's activated vectors and the expert's codes, and
// writes FC2 with bias, one float per route and feature.
template <class L>
__device__ __forceinline__ void down(const DownArguments& a) {
    using W = typename L::Rows;
    using F = typename W::Format;
    using Half = typename L::Half;
    const auto stages = Stages<W, L::kTokens>::made();
    begin_class<L::kClass>();
    const auto items = Items::of(a.tiles, a.tile_ends, L::kClass, (a.hidden + kTileRows - 1) / kTileRows);
    const Matrix fc2{a.fc2_weights, a.fc2_scales, a.fc2_bias, a.fc2_zero_points, a.hidden, a.inter};
    const auto rows = [&](const Work& work, int lane) {
        const int row = down_row(work.row_tile, lane);
        const auto from = [&](int own) { return own >= a.hidden ? 0u : own + 16 >= a.hidden ? 0x3u : 0xfu; };
        const unsigned present = from(row) | from(row + kFeeders) << 4;
        return lane_rows<F>(fc2, fc2, work.expert, present ? row : 0, 8, 16, present, a.apart);
    };
    const auto token_row = [&](int entry) { return entry; };
    const auto store = [&](const Work& work, const Sums<L::kTokens>& sums) {
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
            const int feature = down_row(work.row_tile, threadIdx.x) + 16 * band;
            if (feature < a.hidden) {
                store_contributions<F, L::kTokens>(a, fc2, work, feature, sums[band]);
            }
        }
        if constexpr (L::kChecked) {
            if (work.row_tile == 0 && static_cast<int>(threadIdx.x) < work.count &&
                !route_fits(a, work.first + threadIdx.x)) {
                stages.note_unfit();
            }
        }
    };
    run_items<Half>(stages, items, a.workspace, a.row_bytes, a.inter, rows, token_row, store);
    if constexpr (L::kChecked) {
        stages.report(a.exact_tile_count, a.tile_ends[kClasses - 1] * a.exact_split);
    }
    end_class<L::kClass>();
}

}  // namespace qmoe::prefill

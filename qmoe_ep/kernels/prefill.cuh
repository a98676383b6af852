// Prefill on Hopper's tensor cores: grouped products of quantized weights and the tokens of each expert.
//
// A block of two warpgroups multiplies 256 weight rows with up to 128 tokens. Codes are read ahead into shared memory,
// each lane's to a place of its own, decoded in registers and handed to wgmma as its register operand, so that a weight
// is decoded once per tile of tokens. One lane also feeds the tokens through a ring of shared-memory slots by bulk
// copies. Blocks are persistent and walk a list of tiles that was made on the device. With many tokens the tensor cores
// bound it, with few the reading of the weights.

#pragma once

#include "prefill_multiply.cuh"

namespace qmoe::prefill {

// The compile-time side of FC1 and FC3, which have one format. The lower and upper rows of a warp are gate and up of
// the same features or, without gating, features 128 apart.
template <class HalfType, class MatrixWeights, class UpperBiasFormat, Gating kind, Activation function>
struct GateUp {
    using Half = HalfType;
    using Rows = MatrixWeights;
    using UpperFormat = UpperBiasFormat;  // as that of Rows but for the bias
    static constexpr Gating kGating = kind;
    static constexpr bool kGated = kind != Gating::kNone;
    static constexpr bool kFused = kind == Gating::kInterleaved || kind == Gating::kHalves;
    static constexpr Activation kActivation = function;
    static constexpr bool kChecked = kSameType<HalfType, Float16>;
};

// Note what the checked band saw of two routes' features: whether one is large enough for f16, or small but not zero.
__device__ __forceinline__ void note_magnitudes(unsigned char* state, long long image_rows, int present, float first,
                                                float second) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float size = fabsf(i ? second : first);
        if (i < present && size >= kSmallActivated) {
            state[i] = kLargeSeen;
        } else if (i < present && size > 0.0f) {
            state[image_rows + i] = 1;
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

// Activate one band's features of a tile and write them into the image.
template <class L, int Tokens, class Block>
__device__ __forceinline__ void store_activated(const GateUpArguments& a, const Work& work, int feature, int band,
                                                const float (&lower_terms)[2], const float (&upper_terms)[2],
                                                const float (&result)[Tokens / 2], const Block& block) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const long long row = image_row(work.first, work.expert);
    constexpr int kOutputs = L::kGated ? 1 : 2;
#pragma unroll
    for (int j = 0; j < Tokens / 8; ++j) {
#pragma unroll
        for (int half = 0; half < kOutputs; ++half) {
            float values[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float lower = fmaf(result[4 * j + i], lower_terms[0], lower_terms[1]);
                const float upper = fmaf(result[4 * j + 2 + i], upper_terms[0], upper_terms[1]);
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
                        block.note_unfit();
                    }
                }
            }
            if (L::kChecked && band == kCheckedBand) {
                note_magnitudes(a.route_state + row + 8 * j + 2 * c, a.image_rows, work.count - 8 * j - 2 * c,
                                values[0], values[1]);
            }
            const unsigned pair = transpose_halves(PairMath<typename L::Half>::pack(values[0], values[1]));
            const long long panel = 2ll * (kOutputs * work.row_tile + half) + band / 8;
            if (8 * j + g < work.count) {
                unsigned char* to = a.workspace + (panel * a.image_rows + row + 8 * j + g) * kPanelRowBytes;
                *reinterpret_cast<unsigned*>(to + ((band % 8) ^ g) * 16 + c * 4) = pair;
            }
        }
    }
}

// The weight rows of FC1 that belong to a lane, and their features. Its second band has the features after those of
// the first, one each, because 8 positions of an image make one inner element.
template <class L>
struct GateUpRows {
    int feature;  // of the first row; at least inter if there is none
    int first;
    int upper;  // rows from a lower to the upper row
    int band;   // rows from band to band

    // The features' order within a tile makes an image position of every (band, g): see inner_of_position.
    __device__ __forceinline__ GateUpRows(int row_tile, int inter) {
        const int position = static_cast<int>(threadIdx.x) / 32 * (8 * kBands) + static_cast<int>(threadIdx.x) % 32 / 4;
        feature = (L::kGated ? 1 : 2) * kStepInner * row_tile + inner_of_position(position);
        const int own = min(feature, inter - 2);
        constexpr bool interleaved = L::kGating == Gating::kInterleaved;
        first = interleaved ? 2 * own : own;
        band = interleaved ? 2 : 1;
        upper = interleaved ? 1 : L::kGating == Gating::kHalves ? inter : L::kGating == Gating::kThird ? 0 : kStepInner;
    }

    __device__ __forceinline__ unsigned present(int inter) const {
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
// reads the tile's image of the input and the expert's codes, and writes the image of the activated features.
template <class L>
__device__ __forceinline__ void gate_up(const GateUpArguments& a) {
    using W = typename L::Rows;
    using F = typename W::Format;
    auto block = make_block<W, typename L::Half>();
    constexpr int kFeatures = (L::kGated ? 1 : 2) * kStepInner;
    const auto rows = [&](const Work& work) {
        const GateUpRows<L> own(work.row_tile, a.inter);
        return lane_rows<F>(lower_matrix<L>(a), upper_matrix<L>(a), work.expert, own.first, own.upper, own.band,
                            own.present(a.inter), a.apart);
    };
    const auto tile = [&]<int Tokens>(auto& b, bool ahead) {
        float result[kBands][Tokens / 2];
        b.template multiply_tile<Tokens>(a.hidden, ahead, a.image_rows, result);
        const Work work = b.work();
        const GateUpRows<L> own(work.row_tile, a.inter);
        const Matrix fc1 = lower_matrix<L>(a), further = upper_matrix<L>(a);
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
            const int lower = own.first + band * own.band;
            const int upper = own.present(a.inter) & 2u ? lower + own.upper : lower;
            const float lower_terms[2] = {row_scale<F>(fc1, work.expert, lower),
                                          load_bias<F>(fc1, work.expert, lower)};
            const float upper_terms[2] = {row_scale<F>(further, work.expert, upper),
                                          load_bias<typename L::UpperFormat>(further, work.expert, upper)};
            store_activated<L, Tokens>(a, work, own.feature + band, static_cast<int>(threadIdx.x) / 32 * kBands + band,
                                       lower_terms, upper_terms, result[band], b);
        }
    };
    block.run(a.workspace + a.tokens_offset, a.image_rows, a.tiles, a.tile_count, (a.inter + kFeatures - 1) / kFeatures,
              a.hidden, rows, tile);
    if constexpr (L::kChecked) {
        block.report(a.exact_tile_count, *a.tile_count * a.exact_split);
    }
}

// The compile-time side of FC2.
template <class HalfType, class MatrixWeights>
struct Down {
    using Half = HalfType;
    using Rows = MatrixWeights;
    static constexpr bool kChecked = kSameType<HalfType, Float16>;
};

// Write one band's 16 features of FC2, with scale and bias, for each route of a tile.
template <class F, int Tokens>
__device__ __forceinline__ void store_contributions(const DownArguments& a, const Matrix& fc2, const Work& work,
                                                    int feature, const float (&result)[Tokens / 2]) {
    const float scales[2] = {row_scale<F>(fc2, work.expert, feature), row_scale<F>(fc2, work.expert, feature + 8)};
    const float biases[2] = {load_bias<F>(fc2, work.expert, feature), load_bias<F>(fc2, work.expert, feature + 8)};
    // Lane l of the warp has routes l, l + 32, …, so that they are read side by side.
    const int lane = threadIdx.x % 32;
    int routes[(Tokens + 31) / 32];
#pragma unroll
    for (int i = 0; i < (Tokens + 31) / 32; ++i) {
        routes[i] = 32 * i + lane < work.count ? a.grouped_routes[work.first + 32 * i + lane] : 0;
    }
#pragma unroll
    for (int j = 0; j < Tokens / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = 8 * j + 2 * (lane % 4) + i;
            const long long route = __shfl_sync(kAllLanes, routes[j / 4], token % 32);
            if (token < work.count) {
                float* to = a.contributions + route * a.hidden + feature;
                to[0] = fmaf(result[4 * j + i], scales[0], biases[0]);
                to[8] = fmaf(result[4 * j + 2 + i], scales[1], biases[1]);
            }
        }
    }
}

// The first weight row of a lane of FC2; hidden is a multiple of 16, so a band's rows are all there or none is.
__device__ __forceinline__ int down_row(int row_tile) {
    return kTileRows * row_tile + threadIdx.x / 32 * (16 * kBands) + threadIdx.x % 32 / 4;
}

// Whether f16 held what one route's activated features were: a large one was seen, or all are zero.
__device__ __forceinline__ bool route_fits(const DownArguments& a, long long row) {
    const unsigned char state = a.route_state[row];
    return state == kLargeSeen || (state == kZeroInput && a.route_state[a.image_rows + row] == 0);
}

// A block owns (token tile, 256 weight rows) items: it reads the tile's image of the activated features and the
// expert's codes, and writes FC2 with bias, one float per route and feature.
template <class L>
__device__ __forceinline__ void down(const DownArguments& a) {
    using W = typename L::Rows;
    using F = typename W::Format;
    auto block = make_block<W, typename L::Half>();
    const Matrix fc2{a.fc2_weights, a.fc2_scales, a.fc2_bias, a.fc2_zero_points, a.hidden, a.inter};
    const auto rows = [&](const Work& work) {
        const int row = down_row(work.row_tile);
        const unsigned present = row >= a.hidden ? 0u : row + 16 >= a.hidden ? 0x3u : 0xfu;
        return lane_rows<F>(fc2, fc2, work.expert, present ? row : 0, 8, 16, present, a.apart);
    };
    const auto tile = [&]<int Tokens>(auto& b, bool ahead) {
        float result[kBands][Tokens / 2];
        b.template multiply_tile<Tokens>(a.inter, ahead, a.image_rows, result);
        const Work work = b.work();
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
            const int feature = down_row(work.row_tile) + 16 * band;
            if (feature < a.hidden) {
                store_contributions<F, Tokens>(a, fc2, work, feature, result[band]);
            }
        }
        if constexpr (L::kChecked) {
            if (work.row_tile == 0 && static_cast<int>(threadIdx.x) < work.count &&
                !route_fits(a, image_row(work.first, work.expert) + threadIdx.x)) {
                b.note_unfit();
            }
        }
    };
    block.run(a.workspace, a.image_rows, a.tiles, a.tile_count, (a.hidden + kTileRows - 1) / kTileRows, a.inter, rows,
              tile);
    if constexpr (L::kChecked) {
        block.report(a.exact_tile_count, *a.tile_count * a.exact_split);
    }
}

}  // namespace qmoe::prefill

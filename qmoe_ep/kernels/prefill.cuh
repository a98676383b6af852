// Prefill on Hopper's tensor cores: grouped products of quantized weights and the tokens of each expert.
//
// A block multiplies 256 weight rows with up to 128 tokens. Sixteen warps (four warpgroups) hold 16 weight rows each;
// they read codes and scales straight into registers a step or more ahead, decode them there and hand them to wgmma as
// its register operand, so that a weight is decoded once per tile of tokens. One lane also feeds the tokens through a
// ring of shared-memory slots by bulk copies. Blocks are persistent and walk a list of tiles that was made on
// the device. With many tokens the tensor cores bound it, with few the reading of the weights.

#pragma once

#include "prefill_arguments.cuh"
#include "prefill_pipeline.cuh"
#include "prefill_wgmma.cuh"

namespace qmoe::prefill {

constexpr int kSlots = 6;
constexpr int kSlotBytes = kTileTokens * kStepInner * 2;
constexpr int kSharedBytes = kSlots * kSlotBytes + 2 * 8 * kSlots;  // after alignment to 1024

// The ring in shared memory. Warps wait for `full`, the feeder for `empty`.
struct Ring {
    unsigned slots;
    unsigned full;
    unsigned empty;
    struct Feeder* feeder;
    int* unfit;  // set once a value is met that Half can't hold

    __device__ __forceinline__ unsigned full_barrier(int slot) const { return full + 8 * slot; }
    __device__ __forceinline__ unsigned empty_barrier(int slot) const { return empty + 8 * slot; }
    __device__ __forceinline__ unsigned tokens(int slot) const { return slots + kSlotBytes * slot; }
};

// Feeds the tokens of the block's work items into the ring, a step at a time. The first lane of the block works it
// between its own steps, so that no warp and none of its registers stand idle; its state lives in shared memory.
struct Feeder {
    const unsigned char* image;
    const unsigned char* source;
    const GroupTile* tiles;
    long long image_rows;
    int item;
    int items;
    int tile_count;
    int row_tiles;
    int steps;
    int step;
    int slot;
    unsigned parity;
    unsigned bytes;
    int ahead;  // steps fed and not yet begun by the first warp

    __device__ __forceinline__ void start(const unsigned char* from, long long rows, const GroupTile* list, int count,
                                          int tiles_of_rows, int inner) {
        image = from, image_rows = rows, tiles = list, tile_count = count, row_tiles = tiles_of_rows;
        steps = padded_steps(inner);
        items = count * tiles_of_rows;
        item = blockIdx.x;
        step = slot = ahead = 0;
        parity = 1;
        begin_item();
    }

    __device__ __forceinline__ void begin_item() {
        if (item < items) {
            const Work work = work_item(tiles, tile_count, row_tiles, item);
            bytes = tile_width(work.count) * kPanelRowBytes;
            source = image + image_row(work.first, work.expert) * kPanelRowBytes;
        }
    }

    // Begin a step: feed as many steps as there are empty slots, waiting only for the one that is due.
    __device__ __forceinline__ void advance(const Ring& ring) {
        while (item < items && ahead < kSlots) {
            const unsigned empty = ring.empty_barrier(slot), full = ring.full_barrier(slot);
            if (ahead == 0) {
                barrier_wait(empty, parity);
            } else if (!barrier_test(empty, parity)) {
                break;
            }
            barrier_arrive_expect(full, 2 * bytes);
            bulk_copy(ring.tokens(slot), source, bytes, full);
            bulk_copy(ring.tokens(slot) + bytes, source + image_rows * kPanelRowBytes, bytes, full);
            source += 2 * image_rows * kPanelRowBytes;
            ++ahead;
            if (++slot == kSlots) {
                slot = 0;
                parity ^= 1;
            }
            if (++step == steps) {
                step = 0;
                item += gridDim.x;
                begin_item();
            }
        }
        --ahead;
    }
};

__device__ __forceinline__ Ring make_ring() {
    extern __shared__ unsigned char dynamic_shared[];
    const unsigned base = (shared_address(dynamic_shared) + 1023u) & ~1023u;
    __shared__ Feeder feeder;
    __shared__ int unfit;
    const Ring ring{base, base + kSlots * kSlotBytes, base + kSlots * kSlotBytes + 8 * kSlots, &feeder,
                    &unfit};
    if (threadIdx.x == 0) {
        unfit = 0;
        for (int slot = 0; slot < kSlots; ++slot) {
            barrier_init(ring.full_barrier(slot), 1);
            barrier_init(ring.empty_barrier(slot), kWarps);
        }
        barrier_init_fence();
    }
    __syncthreads();
    return ring;
}

// Multiply this warp's 16 weight rows (of lane 4g + c, row g and row g + 8) with the tokens of a tile. Codes are read
// Depth steps ahead.
template <class W, class Half, int Tokens, int Depth>
__device__ __forceinline__ void multiply(const Ring& ring, RingPlace<kSlots>& place, const RowPair& rows,
                                         int in_features, float (&result)[Tokens / 2]) {
    const int steps = padded_steps(in_features);
    const int lane_inner = kLaneCodes * (threadIdx.x % 4);
    StepCodes<W> lower[Depth], upper[Depth];
#pragma unroll
    for (int d = 0; d < Depth; ++d) {
        load_step<W, false>(rows, kStepInner * d + lane_inner, in_features, lower[d]);
        load_step<W, true>(rows, kStepInner * d + lane_inner, in_features, upper[d]);
    }
    unsigned fragments[2][4];
    for (int base = 0; base < steps; base += Depth) {
#pragma unroll
        for (int d = 0; d < Depth; ++d) {
            const int step = base + d;
            if (step >= steps) {
                break;
            }
            const Decoder<W, Half> lower_decoder(lower[d], rows.row_zero_points[0]);
            const Decoder<W, Half> upper_decoder(upper[d], rows.row_zero_points[1]);
            if (!scales_fit<W, Half>(lower[d]) || !scales_fit<W, Half>(upper[d])) {
                *ring.unfit = 1;
            }
            if (threadIdx.x == 0) {
                ring.feeder->advance(ring);
            }
            __syncwarp();
            barrier_wait(ring.full_barrier(place.slot), place.parity);
            const unsigned long long tokens = token_descriptor(ring.tokens(place.slot));
            // Sixteen inner elements, 16 (2w + t) of the step's positions.
            const auto product = [&]<int w, int t>() {
                unsigned(&f)[4] = fragments[(2 * w + t) % 2];
                f[0] = lower_decoder.template pair<w, 2 * t>(lower[d].words);
                f[1] = upper_decoder.template pair<w, 2 * t>(upper[d].words);
                f[2] = lower_decoder.template pair<w, 2 * t + 1>(lower[d].words);
                f[3] = upper_decoder.template pair<w, 2 * t + 1>(upper[d].words);
                wgmma_fence();
                TensorProduct<Half, Tokens>::run(
                    result, f, tokens + w / 2 * (Tokens * kPanelRowBytes / 16) + (w % 2 * 2 + t) * 2);
                wgmma_commit();
                wgmma_wait<1>();
            };
            product.template operator()<0, 0>();
            // The products of the step before are complete now: its slot may be filled again.
            if (step > 0 && threadIdx.x % 32 == 0) {
                barrier_arrive(ring.empty_barrier(place.previous()));
            }
            product.template operator()<0, 1>();
            product.template operator()<1, 0>();
            product.template operator()<1, 1>();
            product.template operator()<2, 0>();
            product.template operator()<2, 1>();
            product.template operator()<3, 0>();
            product.template operator()<3, 1>();
            load_step<W, false>(rows, kStepInner * (step + Depth) + lane_inner, in_features, lower[d]);
            load_step<W, true>(rows, kStepInner * (step + Depth) + lane_inner, in_features, upper[d]);
            place.advance();
        }
    }
    wgmma_wait<0>();
    if (threadIdx.x % 32 == 0) {
        barrier_arrive(ring.empty_barrier(place.previous()));
    }
#pragma unroll
    for (int i = 0; i < Tokens / 2; ++i) {
        pin(result[i]);
    }
}

// Steps read ahead: enough bytes in flight for memory-bound widths, as registers allow.
template <int Tokens>
constexpr int kDepth = Tokens <= 32 ? 3 : Tokens <= 64 ? 2 : 1;

// Keep a warp's work item in shared memory rather than in registers while it multiplies; returns its tokens.
__device__ __forceinline__ int keep_work(volatile Work& own, const Work& work) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        own.expert = work.expert, own.first = work.first, own.count = work.count, own.row_tile = work.row_tile;
    }
    __syncwarp();
    return work.count;
}

// At a block's end: have the exact kernels run if it met values that Half can't hold.
template <bool checked>
__device__ __forceinline__ void report_unfit(const Ring& ring, int* exact_tile_count, int exact_tiles) {
    if constexpr (checked) {
        __syncthreads();
        if (threadIdx.x == 0 && *ring.unfit) {
            *exact_tile_count = exact_tiles;
        }
    }
}

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

// Note what the checked warp saw of two routes' features: whether one is large enough for f16, or small but not zero.
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

// 1 / (1 + exp(-x)) with the hardware's exponential and reciprocal, each accurate to about 2^-22 of its value: far finer
// than the half that the activated feature is rounded to. Infinities and NaN come out as from exact functions.
__device__ __forceinline__ float fast_sigmoid(float x) {
    float power, result;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
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

// Activate one warp's features of a tile and write them into the image.
template <class L, int Tokens>
__device__ __forceinline__ void store_activated(const GateUpArguments& a, const Work& work, int feature,
                                                const float (&lower_terms)[2], const float (&upper_terms)[2],
                                                const float (&result)[Tokens / 2], int* unfit) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
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
                        *unfit = 1;
                    }
                }
            }
            if (L::kChecked && warp == kCheckedWarp) {
                note_magnitudes(a.route_state + row + 8 * j + 2 * c, a.image_rows,
                                work.count - 8 * j - 2 * c, values[0], values[1]);
            }
            const unsigned pair = transpose_halves(PairMath<typename L::Half>::pack(values[0], values[1]));
            const long long panel = 2ll * (kOutputs * work.row_tile + half) + warp / 8;
            if (8 * j + g < work.count) {
                unsigned char* to = a.workspace + (panel * a.image_rows + row + 8 * j + g) * kPanelRowBytes;
                *reinterpret_cast<unsigned*>(to + ((warp % 8) ^ g) * 16 + c * 4) = pair;
            }
        }
    }
}

// The weight rows of FC1 that belong to a lane of a warp, and their features.
template <class L>
struct GateUpRows {
    int feature;  // of the lower row; at least inter if there is none
    int lower;
    int apart;  // from the lower row to the upper one

    // The features' order within a tile makes an image position of every (warp, g): see inner_of_position.
    __device__ __forceinline__ GateUpRows(int row_tile, int inter) {
        const int position = threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;
        feature = (L::kGated ? 1 : 2) * kStepInner * row_tile + inner_of_position(position);
        const int own = min(feature, inter - 1);
        lower = L::kGating == Gating::kInterleaved ? 2 * own : own;
        if constexpr (L::kGated) {
            apart = L::kGating == Gating::kInterleaved ? 1 : L::kGating == Gating::kHalves ? inter : 0;
        } else {
            apart = feature + kStepInner < inter ? kStepInner : 0;
        }
    }

    __device__ __forceinline__ RowsApart bytes(const RowsApart& whole) const {
        if constexpr (L::kGating == Gating::kNone) {
            return apart ? whole : RowsApart{};
        } else if constexpr (L::kGating == Gating::kThird) {
            return RowsApart{};
        } else {
            return whole;
        }
    }
};

template <class L, int Tokens>
__device__ __forceinline__ void gate_up_tile(const GateUpArguments& a, const Ring& ring, RingPlace<kSlots>& place,
                                             const volatile Work& work) {
    using F = typename L::Rows::Format;
    const Matrix fc1{a.fc1_weights, a.fc1_scales, a.fc1_bias, a.fc1_zero_points, L::kFused ? 2 * a.inter : a.inter,
                     a.hidden};
    const bool third = L::kGating == Gating::kThird;
    const Matrix fc3{third ? a.fc3_weights : a.fc1_weights, third ? a.fc3_scales : a.fc1_scales,
                     third ? a.fc3_bias : a.fc1_bias, third ? a.fc3_zero_points : a.fc1_zero_points,
                     fc1.out_features, a.hidden};
    float result[Tokens / 2] = {};
    {
        const GateUpRows<L> own(work.row_tile, a.inter);
        const RowPair rows = row_pair<F>(fc1, fc3, work.expert, own.lower, own.apart, own.bytes(a.apart));
        multiply<typename L::Rows, typename L::Half, Tokens, kDepth<Tokens>>(ring, place, rows, a.hidden, result);
    }
    const Work done{work.expert, work.first, work.count, work.row_tile};
    const GateUpRows<L> own(done.row_tile, a.inter);
    const int upper = own.lower + own.apart;
    const float lower_terms[2] = {row_scale<F>(fc1, done.expert, own.lower),
                                  load_bias<F>(fc1, done.expert, own.lower)};
    const float upper_terms[2] = {row_scale<F>(fc3, done.expert, upper),
                                  load_bias<typename L::UpperFormat>(fc3, done.expert, upper)};
    store_activated<L, Tokens>(a, done, own.feature, lower_terms, upper_terms, result, ring.unfit);
}

// A block owns (token tile, 256 weight rows) items: 128 intermediate features, gate and up, or 256 without gating. It
// reads the tile's image of the input and the expert's codes, and writes the image of the activated features.
template <class L>
__device__ __forceinline__ void gate_up(const GateUpArguments& a) {
    const Ring ring = make_ring();
    const int tile_count = *a.tile_count;
    const int row_tiles = (a.inter + (L::kGated ? 1 : 2) * kStepInner - 1) / ((L::kGated ? 1 : 2) * kStepInner);
    if (threadIdx.x == 0) {
        ring.feeder->start(a.workspace + a.tokens_offset, a.image_rows, a.tiles, tile_count, row_tiles, a.hidden);
    }
    __syncwarp();
    __shared__ Work works[kWarps];
    volatile Work& own_work = works[threadIdx.x / 32];
    RingPlace<kSlots> place;
    const int items = tile_count * row_tiles;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        switch (tile_width(keep_work(own_work, work_item(a.tiles, tile_count, row_tiles, item)))) {
            case 16: gate_up_tile<L, 16>(a, ring, place, own_work); break;
            case 32: gate_up_tile<L, 32>(a, ring, place, own_work); break;
            case 64: gate_up_tile<L, 64>(a, ring, place, own_work); break;
            case 96: gate_up_tile<L, 96>(a, ring, place, own_work); break;
            default: gate_up_tile<L, 128>(a, ring, place, own_work); break;
        }
    }
    report_unfit<L::kChecked>(ring, a.exact_tile_count, tile_count * a.exact_split);
}

// The compile-time side of FC2.
template <class HalfType, class MatrixWeights>
struct Down {
    using Half = HalfType;
    using Rows = MatrixWeights;
    static constexpr bool kChecked = kSameType<HalfType, Float16>;
};

// Write one warp's 16 features of FC2, with scale and bias, for each route of a tile.
template <class F, int Tokens>
__device__ __forceinline__ void store_contributions(const DownArguments& a, const Matrix& fc2, const Work& work,
                                                    int feature, const float (&result)[Tokens / 2]) {
    const float scales[2] = {row_scale<F>(fc2, work.expert, feature), row_scale<F>(fc2, work.expert, feature + 8)};
    const float biases[2] = {load_bias<F>(fc2, work.expert, feature), load_bias<F>(fc2, work.expert, feature + 8)};
#pragma unroll
    for (int j = 0; j < Tokens / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = 8 * j + 2 * (threadIdx.x % 4) + i;
            if (token < work.count) {
                const long long route = a.grouped_routes[work.first + token];
                float* to = a.contributions + route * a.hidden + feature;
                to[0] = fmaf(result[4 * j + i], scales[0], biases[0]);
                to[8] = fmaf(result[4 * j + 2 + i], scales[1], biases[1]);
            }
        }
    }
}

// The first weight row of a lane of FC2; hidden is a multiple of 16, so a warp's rows are all there or none is.
__device__ __forceinline__ int down_row(int row_tile) {
    return kTileRows * row_tile + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
}

template <class L, int Tokens>
__device__ __forceinline__ void down_tile(const DownArguments& a, const Ring& ring, RingPlace<kSlots>& place,
                                          const volatile Work& work) {
    using F = typename L::Rows::Format;
    const Matrix fc2{a.fc2_weights, a.fc2_scales, a.fc2_bias, a.fc2_zero_points, a.hidden, a.inter};
    float result[Tokens / 2] = {};
    {
        const int row = down_row(work.row_tile);
        const RowPair rows = row_pair<F>(fc2, fc2, work.expert, row < a.hidden ? row : 0, 8, a.apart);
        multiply<typename L::Rows, typename L::Half, Tokens, kDepth<Tokens>>(ring, place, rows, a.inter, result);
    }
    const Work done{work.expert, work.first, work.count, work.row_tile};
    const int feature = down_row(done.row_tile);
    if (feature < a.hidden) {
        store_contributions<F, Tokens>(a, fc2, done, feature, result);
    }
    if constexpr (L::kChecked) {
        if (done.row_tile == 0 && static_cast<int>(threadIdx.x) < done.count) {
            const long long row = image_row(done.first, done.expert) + threadIdx.x;
            const unsigned char state = a.route_state[row];
            if (state != kLargeSeen && (state != kZeroInput || a.route_state[a.image_rows + row])) {
                *ring.unfit = 1;
            }
        }
    }
}

// A block owns (token tile, 256 weight rows) items: it reads the tile's image of the activated features and the
// expert's codes, and writes FC2 with bias, one float per route and feature.
template <class L>
__device__ __forceinline__ void down(const DownArguments& a) {
    const Ring ring = make_ring();
    const int tile_count = *a.tile_count;
    const int row_tiles = (a.hidden + kTileRows - 1) / kTileRows;
    if (threadIdx.x == 0) {
        ring.feeder->start(a.workspace, a.image_rows, a.tiles, tile_count, row_tiles, a.inter);
    }
    __syncwarp();
    __shared__ Work works[kWarps];
    volatile Work& own_work = works[threadIdx.x / 32];
    RingPlace<kSlots> place;
    const int items = tile_count * row_tiles;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        switch (tile_width(keep_work(own_work, work_item(a.tiles, tile_count, row_tiles, item)))) {
            case 16: down_tile<L, 16>(a, ring, place, own_work); break;
            case 32: down_tile<L, 32>(a, ring, place, own_work); break;
            case 64: down_tile<L, 64>(a, ring, place, own_work); break;
            case 96: down_tile<L, 96>(a, ring, place, own_work); break;
            default: down_tile<L, 128>(a, ring, place, own_work); break;
        }
    }
    report_unfit<L::kChecked>(ring, a.exact_tile_count, tile_count * a.exact_split);
}

}  // namespace qmoe::prefill

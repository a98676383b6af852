// The inner loop of the prefill kernels: weights decoded in registers and multiplied with a tile's tokens.

#pragma once

#include "prefill_stages.cuh"
#include "prefill_wgmma.cuh"

namespace qmoe::prefill {

// A lane's part of the weights in one stage.
template <class W, class Half, int Tokens>
struct LaneWeights {
    using S = Stages<W, Tokens>;
    unsigned at;          // shared address of the stage's weights
    unsigned lane;        // threadIdx.x
    unsigned row_points;  // row-wise formats: byte i is the zero point of row i

    // The scales and zero points of one panel of a band.
    template <int panel, int band>
    __device__ __forceinline__ void load_decoders(Decoder<W, Half>& lower, Decoder<W, Half>& upper) const {
        constexpr int kScale = W::kScales == 2 ? panel : 0;
        lower.zero_point = upper.zero_point = 1u << (W::Format::kBits - 1);
        if constexpr (W::kBlocks) {
            unsigned scales[2];
            load_shared<2>(at + S::kScales + 16 * (kScale * kLanes + lane) + 8 * band, scales);
            lower.scale = scales[0], upper.scale = scales[1];
        }
        if constexpr (W::Format::kZeroPoints) {
            unsigned points[1] = {row_points};
            if constexpr (W::kPoints) {
                load_shared<1>(at + S::kPoints + 4 * (kScale * kLanes + lane), points);
            }
            lower.zero_point = points[0] >> (16 * band) & 0xffu;
            upper.zero_point = points[0] >> (16 * band + 8) & 0xffu;
        }
    }

    // The codes of one panel of row `row`.
    template <int panel>
    __device__ __forceinline__ void load_codes(int row, unsigned (&words)[kPanelWords<W::Format::kBits>]) const {
        constexpr int kBits = W::Format::kBits;
        constexpr int kByte = kBits == 1 ? 0 : kBits == 3 ? 4 * panel : 2 * kBits * panel;
        const unsigned from = at + (row * W::kPieces + kByte / W::kPieceBytes) * S::kPieceStride +
                              lane * W::kPieceBytes + kByte % W::kPieceBytes;
        if constexpr (kBits == 3) {
            load_shared<1>(from, words);
            load_shared<1>(from + 4, words + 1);
        } else {
            load_shared<kPanelWords<kBits>>(from, words);
        }
    }
};

// Decode 64 positions of a step, panel `panel`, of a band's two rows into the fragments of four products.
template <int panel, class W, class Half, int Words>
__device__ __forceinline__ void decode_panel(const Decoder<W, Half>& lower, const Decoder<W, Half>& upper,
                                             const unsigned (&lower_codes)[Words], const unsigned (&upper_codes)[Words],
                                             unsigned (&fragments)[16]) {
    const auto word = [&]<int i>() {
        unsigned* f = fragments + 8 * i;
        constexpr int w = 2 * panel + i;
        f[0] = lower.template pair<w, 0>(lower_codes);
        f[1] = upper.template pair<w, 0>(upper_codes);
        f[2] = lower.template pair<w, 1>(lower_codes);
        f[3] = upper.template pair<w, 1>(upper_codes);
        f[4] = lower.template pair<w, 2>(lower_codes);
        f[5] = upper.template pair<w, 2>(upper_codes);
        f[6] = lower.template pair<w, 3>(lower_codes);
        f[7] = upper.template pair<w, 3>(upper_codes);
    };
    word.template operator()<0>();
    word.template operator()<1>();
}

// A lane's results: of token 8j + 2c + i, element 4j + i is that of a band's lower row, 4j + 2 + i of its upper row.
template <int Tokens>
using Sums = float[kBands][Tokens / 2];

// One of the threads that multiply, and its place in the ring.
template <class W, class Half, int Tokens>
struct Multiplier {
    using S = Stages<W, Tokens>;
    // Batches of fragments. Where decoding takes many registers there are none for a second.
    static constexpr int kBuffers = W::Format::kBits == 8 || W::Format::kBits == 1 || W::kRowPoints ? 1 : 2;
    // Of 168 registers for each thread; the division is what makes the compiler find enough for all.
    static constexpr int kFeederRegisters = kBuffers == 1 ? 88 : 120;
    static constexpr int kRegisters = kBuffers == 1 ? 208 : 192;
    static_assert(kFeeders * kFeederRegisters + kLanes * kRegisters <= kThreads * 168);
    S stages;
    RingPlace<S::kDepth> place;
    unsigned row_points;

    // Multiply a warp's two bands of 16 weight rows (of lane 4g + c, row g and row g + 8 of each) with the tokens of a
    // tile. Products are issued in batches of four, half a step of one band, because the tensor cores lose time when
    // they change from one accumulator to another; while a batch runs the next one is decoded.
    __device__ __forceinline__ void multiply(int in_features, Sums<Tokens>& sums) {
#pragma unroll
        for (int i = 0; i < kBands * Tokens / 2; ++i) {
            sums[i % kBands][i / kBands] = 0.0f;
            pin(sums[i % kBands][i / kBands]);  // else it may be zeroed while the other band's products run
        }
        const int steps = padded_steps(in_features);
        unsigned fragments[kBuffers][16];
        const bool leads = threadIdx.x % 32 == 0;
        for (int step = 0; step < steps; ++step) {
            barrier_wait(stages.full(place.slot), place.parity);
            const unsigned long long tokens = token_descriptor(stages.tokens(place.slot));
            const LaneWeights<W, Half, Tokens> weights{stages.weights(place.slot), threadIdx.x, row_points};
            const auto batch = [&]<int panel, int band>() {
                unsigned lower[kPanelWords<W::Format::kBits>], upper[kPanelWords<W::Format::kBits>];
                weights.template load_codes<panel>(2 * band, lower);
                weights.template load_codes<panel>(2 * band + 1, upper);
                Decoder<W, Half> lower_decoder, upper_decoder;
                weights.template load_decoders<panel, band>(lower_decoder, upper_decoder);
                unsigned(&own)[16] = fragments[band % kBuffers];
                wgmma_wait<kBuffers - 1>();  // its fragments are free again
                decode_panel<panel>(lower_decoder, upper_decoder, lower, upper, own);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    TensorProduct<Half, Tokens>::run(sums[band], own + 4 * i,
                                                     tokens + panel * (Tokens * kPanelRowBytes / 16) + 2 * i);
                }
                wgmma_commit();
            };
            batch.template operator()<0, 0>();
            batch.template operator()<0, 1>();
            // The products of the step before are complete now: its stage may be filled again.
            if (step > 0 && leads) {
                barrier_arrive(stages.empty(place.previous()));
            }
            batch.template operator()<1, 0>();
            batch.template operator()<1, 1>();
            place.advance();
        }
        wgmma_wait<0>();
        if (leads) {
            barrier_arrive(stages.empty(place.previous()));
        }
#pragma unroll
        for (int i = 0; i < kBands * Tokens / 2; ++i) {
            pin(sums[i % kBands][i / kBands]);
        }
    }
};

// A block's walk over its items, in two roles. rows(work, lane) gives the weight rows of a lane and the one fed with it; token_row(i) the row of
// `tokens`, an array of rows of `row_bytes`, that belongs to entry i of grouped_routes. store(work, sums)
// does what is to be done with the results.
template <class Half, class W, int Tokens, class Rows, class TokenRow, class Store>
__device__ __forceinline__ void run_items(const Stages<W, Tokens>& stages, const Items& items, const unsigned char* tokens,
                                          int row_bytes, int in_features, const Rows& rows, const TokenRow& token_row,
                                          const Store& store) {
    const int end = items.count();
    if (threadIdx.x >= kLanes) {
        keep_registers<Multiplier<W, Half, Tokens>::kFeederRegisters>();
        Feeder<W, Half, Tokens> feeder(stages);
        const int steps = padded_steps(in_features);
        int item = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x), step = steps, count = 0;
        feeder.run(in_features, [&](auto& own) {
            if (++step >= steps) {
                item += gridDim.x;
                if (item >= end) {
                    return FeederStep{tokens, 0, -1};
                }
                step = 0;
                const Work work = items.at(item);
                own.rows = rows(work, own.thread);
                const int token = min(own.own_token(), work.count - 1);
                own.token_unit = static_cast<unsigned>(token_row(work.first + token)) * (row_bytes / 16u);
                count = work.count;
            }
            return FeederStep{tokens, count, step};
        });
    } else {
        take_registers<Multiplier<W, Half, Tokens>::kRegisters>();
        Multiplier<W, Half, Tokens> multiplier{stages, {}, 0};
        for (int item = blockIdx.x; item < end; item += gridDim.x) {
            if constexpr (W::kRowPoints) {
                multiplier.row_points = rows(items.at(item), static_cast<int>(threadIdx.x)).row_zero_points;
            }
            Sums<Tokens> sums;
            multiplier.multiply(in_features, sums);
            store(items.at(item), sums);
        }
    }
}

}  // namespace qmoe::prefill

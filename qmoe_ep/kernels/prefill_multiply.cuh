// The inner loop of the prefill kernels: weights read ahead, decoded in registers and multiplied with a tile's tokens.

#pragma once

#include "prefill_tokens.cuh"
#include "prefill_wgmma.cuh"

namespace qmoe::prefill {

constexpr int kSharedBytes = 224 << 10;  // dynamic, from an address that is a multiple of 1024

// How a block divides its shared memory, for weights W: the ring of tokens, where the next rows are kept, and stages of
// weights. Each lane's part of a stage is its own, so that nobody has to be waited for.
template <class W>
struct Stages {
    static constexpr int kSlots = W::Format::kBits == 8 && W::kPoints ? 3 : 4;
    static constexpr int kUnfit = Ring<kSlots>::kBytes;  // a flag: a value was met that Half can't hold
    static constexpr int kWorks = kUnfit + 16;           // every warp's work item
    static constexpr int kNextRows = kWorks + 16 * kWarps;
    static constexpr int kFirst = kNextRows + 28 * kThreads;
    static constexpr int kStageBytes = kThreads * W::kLaneBytes;
    static constexpr int kFitting = (kSharedBytes - kFirst) / kStageBytes;
    static constexpr int kDepth = kFitting < 6 ? kFitting : 6;
    static_assert(kDepth >= 2, "scales are stored one step after they were read");

    static constexpr int kPieceStride = kThreads * W::kPieceBytes;
    static constexpr int kScales = 2 * W::kRowBytes * kThreads;
    static constexpr int kPoints = kScales + (W::kBlocks ? 8 * W::kScales * kThreads : 0);
};

// A lane's place in the weights of the block's items, kDepth steps ahead of the products, across items. `lone` says
// that an item may have lower rows without upper ones.
template <class W, class Half, bool lone>
struct Reader {
    using S = Stages<W>;
    unsigned base;  // of shared memory
    int stage = 0;  // the next to be multiplied and then read again
    RowPair rows;
    unsigned row_points;  // of the rows being multiplied, in row-wise formats: lower | upper << 8
    PendingScales<W> pending;

    __device__ __forceinline__ unsigned stage_address(int which) const {
        return base + S::kFirst + which * S::kStageBytes;
    }
    __device__ __forceinline__ void next_stage() { stage = stage + 1 == S::kDepth ? 0 : stage + 1; }

    __device__ __forceinline__ void note_unfit() const { store_shared(base + S::kUnfit, 1); }

    // Leave the rows of the item after the one being read where `take_next` finds them.
    __device__ __forceinline__ void keep_next(const RowPair& next) const {
        const unsigned at = base + S::kNextRows + 8 * threadIdx.x;
        store_shared_long(at, reinterpret_cast<unsigned long long>(next.codes));
        if constexpr (W::kBlocks) {
            store_shared_long(at + 8 * kThreads, reinterpret_cast<unsigned long long>(next.scales));
        }
        if constexpr (W::kPoints) {
            store_shared_long(at + 16 * kThreads, reinterpret_cast<unsigned long long>(next.zero_points));
        }
        if constexpr (lone) {
            store_shared(base + S::kNextRows + 24 * kThreads + 4 * threadIdx.x, next.paired);
        }
    }

    __device__ __forceinline__ void take_next() {
        const unsigned at = base + S::kNextRows + 8 * threadIdx.x;
        rows.codes = reinterpret_cast<const unsigned char*>(load_shared_long(at));
        if constexpr (W::kBlocks) {
            rows.scales = reinterpret_cast<const unsigned char*>(load_shared_long(at + 8 * kThreads));
        }
        if constexpr (W::kPoints) {
            rows.zero_points = reinterpret_cast<const unsigned char*>(load_shared_long(at + 16 * kThreads));
        }
        if constexpr (lone) {
            unsigned paired[1];
            load_shared<1>(base + S::kNextRows + 24 * kThreads + 4 * threadIdx.x, paired);
            rows.paired = paired[0];
        }
    }

    // Begin to read a step of the rows into the present stage and move on.
    __device__ __forceinline__ void read(int step, int in_features) {
        using F = typename W::Format;
        const int inner = kStepInner * step + kLaneCodes * static_cast<int>(threadIdx.x % 4);
        const int bytes = min(max(in_features - inner, 0), kLaneCodes) / 8 * F::kBits;
        // A lane past the end reads nothing; its address must be one nevertheless.
        const unsigned char* source = rows.codes + (bytes ? static_cast<unsigned>(inner) / 8 * F::kBits : 0u);
        const unsigned to = stage_address(stage) + threadIdx.x * W::kPieceBytes;
        copy_codes<W>(to, S::kPieceStride, source, bytes);
        const bool paired = !lone || rows.paired;
        copy_codes<W>(to + W::kPieces * S::kPieceStride, S::kPieceStride, source + (paired ? rows.apart.codes : 0),
                      paired ? bytes : 0);
        copy_commit();
        load_scales<W, lone>(rows, inner, in_features, pending);
        next_stage();
    }

    // Store the scales that the last `read` read.
    __device__ __forceinline__ void settle() {
        if constexpr (W::kBlocks) {
            if (!scales_fit<W, Half>(pending)) {
                note_unfit();
            }
            const unsigned at = stage_address(stage == 0 ? S::kDepth - 1 : stage - 1);
#pragma unroll
            for (int i = 0; i < W::kScales; ++i) {
                store_shared_pair(at + S::kScales + 8 * (i * kThreads + threadIdx.x),
                                  stored_scale<W, Half>(pending.scales[0][i]),
                                  stored_scale<W, Half>(pending.scales[1][i]));
                if constexpr (W::kPoints) {
                    store_shared(at + S::kPoints + 4 * (i * kThreads + threadIdx.x),
                                 pending.zero_points[0][i] | static_cast<unsigned>(pending.zero_points[1][i]) << 8);
                }
            }
        }
    }

    // The scales and zero points of the present stage.
    __device__ __forceinline__ void load_decoders(Decoder<W, Half>& lower, Decoder<W, Half>& upper) const {
        const unsigned at = stage_address(stage);
#pragma unroll
        for (int i = 0; i < W::kScales; ++i) {
            lower.zero_points[i] = upper.zero_points[i] = 1u << (W::Format::kBits - 1);
            if constexpr (W::kBlocks) {
                unsigned pair[2];
                load_shared<2>(at + S::kScales + 8 * (i * kThreads + threadIdx.x), pair);
                lower.scales[i] = pair[0], upper.scales[i] = pair[1];
            }
            if constexpr (W::kPoints) {
                unsigned points[1];
                load_shared<1>(at + S::kPoints + 4 * (i * kThreads + threadIdx.x), points);
                lower.zero_points[i] = points[0] & 0xffu, upper.zero_points[i] = points[0] >> 8;
            } else if constexpr (W::Format::kZeroPoints) {
                lower.zero_points[i] = row_points & 0xffu, upper.zero_points[i] = row_points >> 8;
            }
        }
    }

    // One piece of the codes of the present stage.
    template <int piece>
    __device__ __forceinline__ void load_codes(unsigned* lower, unsigned* upper) const {
        const unsigned at = stage_address(stage) + piece * S::kPieceStride + threadIdx.x * W::kPieceBytes;
        load_shared<W::kPieceBytes / 4>(at, lower);
        load_shared<W::kPieceBytes / 4>(at + W::kPieces * S::kPieceStride, upper);
    }
};

// Products of 16 inner elements that are waited for together; with many tokens there are no registers for two.
template <int Tokens>
constexpr int kProductsTogether = Tokens <= 64 ? 2 : 1;

// Multiply a warp's 16 weight rows (of lane 4g + c, row g and row g + 8) with the tokens of a tile. `ahead` says that
// whole stages were read before and that later ones, of the next item too, are to be read on the way.
template <class W, class Half, int Tokens, bool lone>
__device__ __forceinline__ void multiply(const Ring<Stages<W>::kSlots>& ring, Feeder<Stages<W>::kSlots>& feeder,
                                         RingPlace<Stages<W>::kSlots>& place, Reader<W, Half, lone>& reader,
                                         int in_features, bool ahead, float (&result)[Tokens / 2]) {
    const int steps = padded_steps(in_features);
    constexpr int kBatch = kProductsTogether<Tokens>;
    unsigned fragments[2][4 * kBatch];
    for (int step = 0; step < steps; ++step) {
        if (ahead) {
            copy_wait<Stages<W>::kDepth - 1>();
        } else {
            copy_wait<0>();
        }
        unsigned lower[W::kPieceBytes / 4], upper[W::kPieceBytes / 4];
        Decoder<W, Half> lower_decoder, upper_decoder;
        reader.template load_codes<0>(lower, upper);
        reader.load_decoders(lower_decoder, upper_decoder);
        if (threadIdx.x == 0) {
            feeder.advance(ring);
        }
        __syncwarp();
        barrier_wait(ring.full_barrier(place.slot), place.parity);
        const unsigned long long tokens = token_descriptor(ring.tokens(place.slot));
        // Positions 32w + 16t .. + 15 of the step; the last of a batch waits for the batch before.
        const auto product = [&]<int w, int t>() {
            unsigned* f = fragments[(kBatch == 2 ? w : t) % 2] + (kBatch == 2 ? 4 * t : 0);
            f[0] = lower_decoder.template pair<w, 2 * t>(lower);
            f[1] = upper_decoder.template pair<w, 2 * t>(upper);
            f[2] = lower_decoder.template pair<w, 2 * t + 1>(lower);
            f[3] = upper_decoder.template pair<w, 2 * t + 1>(upper);
            wgmma_fence();
            TensorProduct<Half, Tokens>::run(
                result, f, tokens + w / 2 * (Tokens * kPanelRowBytes / 16) + (w % 2 * 2 + t) * 2);
            if (kBatch == 1 || t == 1) {
                wgmma_commit();
                wgmma_wait<1>();
            }
        };
        product.template operator()<0, 0>();
        product.template operator()<0, 1>();
        // The products of the step before are complete now: its slot may be filled again.
        if (step > 0 && threadIdx.x % 32 == 0) {
            barrier_arrive(ring.empty_barrier(place.previous()));
        }
        product.template operator()<1, 0>();
        product.template operator()<1, 1>();
        if constexpr (W::kPieces == 2) {
            reader.template load_codes<1>(lower, upper);
        }
        product.template operator()<2, 0>();
        product.template operator()<2, 1>();
        product.template operator()<3, 0>();
        product.template operator()<3, 1>();
        if (ahead) {
            reader.settle();
            int later = step + Stages<W>::kDepth;
            if (later >= steps) {
                if (later == steps) {
                    reader.take_next();
                }
                later -= steps;
            }
            reader.read(later, in_features);
        } else {
            reader.next_stage();
        }
        place.advance();
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

// A block's shared memory and its walk over its items.
template <class W, class Half, bool lone>
struct Block {
    using S = Stages<W>;
    Ring<S::kSlots> ring;
    Feeder<S::kSlots>& feeder;
    RingPlace<S::kSlots> place;
    Reader<W, Half, lone> reader;

    // Multiply every item's weight rows with its tokens: rows(work) gives a lane's rows; tile is called with the width
    // in tokens as a template argument, to multiply and store.
    template <class Rows, class Tile>
    __device__ __forceinline__ void run(const unsigned char* image, long long image_rows, const GroupTile* tiles,
                                        int tile_count, int row_tiles, int in_features, const Rows& rows,
                                        const Tile& tile) {
        const bool ahead = padded_steps(in_features) >= S::kDepth;
        if (threadIdx.x == 0) {
            feeder.start(image, image_rows, tiles, tile_count, row_tiles, in_features);
        }
        __syncthreads();
        // Read anew for every item, so that they occupy no registers meanwhile.
        const volatile auto& walk = feeder;
        const auto work_of = [&](int item) { return work_item(tiles, walk.tile_count, walk.row_tiles, item); };
        for (int item = blockIdx.x; item < walk.items; item += gridDim.x) {
            const Work work = work_of(item);
            keep(work);
            if (ahead) {
                const int next = item + static_cast<int>(gridDim.x);
                reader.keep_next(rows(work_of(next < walk.items ? next : item)));
            }
            if constexpr (W::kRowPoints) {
                reader.row_points = rows(work).row_zero_points;
            }
            if (!ahead || item == static_cast<int>(blockIdx.x)) {
                reader.rows = rows(work);
                reader.stage = 0;
                for (int step = 0; step < min(S::kDepth, padded_steps(in_features)); ++step) {
                    reader.read(step, in_features);
                    reader.settle();
                }
                reader.stage = 0;
            }
            switch (tile_width(work.count)) {
                case 16: tile.template operator()<16>(*this, ahead); break;
                case 32: tile.template operator()<32>(*this, ahead); break;
                case 64: tile.template operator()<64>(*this, ahead); break;
                case 96: tile.template operator()<96>(*this, ahead); break;
                default: tile.template operator()<128>(*this, ahead); break;
            }
        }
        copy_wait<0>();
    }

    template <int Tokens>
    __device__ __forceinline__ void multiply_tile(int in_features, bool ahead, float (&result)[Tokens / 2]) {
        multiply<W, Half, Tokens, lone>(ring, feeder, place, reader, in_features, ahead, result);
    }

    __device__ __forceinline__ unsigned work_address() const { return ring.base + S::kWorks + threadIdx.x / 32 * 16; }

    // The warp's work item is kept in shared memory, out of registers, while it multiplies.
    __device__ __forceinline__ void keep(const Work& work) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            store_shared_pair(work_address(), work.expert, work.first);
            store_shared_pair(work_address() + 8, work.count, work.row_tile);
        }
        __syncwarp();
    }

    __device__ __forceinline__ Work work() const {
        unsigned words[4];
        load_shared<4>(work_address(), words);
        return Work{static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]),
                    static_cast<int>(words[3])};
    }

    __device__ __forceinline__ void note_unfit() const { reader.note_unfit(); }

    // At the block's end: have the exact kernels run if it met values that Half can't hold.
    __device__ __forceinline__ void report(int* exact_tile_count, int exact_tiles) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned unfit[1];
            load_shared<1>(ring.base + S::kUnfit, unfit);
            if (unfit[0]) {
                *exact_tile_count = exact_tiles;
            }
        }
    }
};

template <class W, class Half, bool lone>
__device__ __forceinline__ Block<W, Half, lone> make_block() {
    using S = Stages<W>;
    __shared__ Feeder<S::kSlots> feeder;
    const unsigned base = (dynamic_shared_address() + 1023u) & ~1023u;
    const Ring<S::kSlots> ring{base};
    if (threadIdx.x == 0) {
        store_shared(base + S::kUnfit, 0);
        ring.initialise();
    }
    __syncthreads();
    dependent_begin();
    return Block<W, Half, lone>{ring, feeder, {}, {base}};
}

}  // namespace qmoe::prefill

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
    static constexpr int kSources = kWorks + 16 * kWarps;  // and the tokens of it and of the next
    static constexpr int kNextRows = kSources + 32 * kWarps;
    static constexpr int kLead = kSlots - 2;  // steps that tokens are fed ahead
    static constexpr int kFirst = kNextRows + 32 * kThreads;
    static constexpr int kStageBytes = kThreads * W::kLaneBytes;
    static constexpr int kFitting = (kSharedBytes - kFirst) / kStageBytes;
    static constexpr int kDepth = kFitting < 6 ? kFitting : 6;
    static_assert(kDepth >= 2, "scales are stored one step after they were read");

    static constexpr int kPieceStride = kThreads * W::kPieceBytes;
    static constexpr int kScales = kLaneRows * W::kRowBytes * kThreads;
    static constexpr int kPoints = kScales + (W::kBlocks ? 16 * W::kScales * kThreads : 0);
};

// A lane's place in the weights of the block's items, kDepth steps ahead of the products, across items.
template <class W, class Half>
struct Reader {
    using S = Stages<W>;
    unsigned base;    // of shared memory
    unsigned thread;  // threadIdx.x
    int stage = 0;  // the next to be multiplied and then read again
    LaneRows rows;
    unsigned row_points;  // of the rows being multiplied, as in LaneRows
    PendingScales<W> pending;

    __device__ __forceinline__ unsigned stage_address(int which) const {
        return base + S::kFirst + which * S::kStageBytes;
    }
    __device__ __forceinline__ void next_stage() { stage = stage + 1 == S::kDepth ? 0 : stage + 1; }
    __device__ __forceinline__ void note_unfit() const { store_shared(base + S::kUnfit, 1); }

    // Leave the rows of the item after the one being read where `take_next` finds them.
    __device__ __forceinline__ void keep_next(const LaneRows& next) const {
        const unsigned at = base + S::kNextRows + 8 * thread;
        store_shared_long(at, reinterpret_cast<unsigned long long>(next.codes));
        if constexpr (W::kBlocks) {
            store_shared_long(at + 8 * kThreads, reinterpret_cast<unsigned long long>(next.scales));
        }
        if constexpr (W::kPoints) {
            store_shared_long(at + 16 * kThreads, reinterpret_cast<unsigned long long>(next.zero_points));
        }
        store_shared(at + 24 * kThreads, next.present);
    }

    __device__ __forceinline__ void take_next() {
        const unsigned at = base + S::kNextRows + 8 * thread;
        rows.codes = reinterpret_cast<const unsigned char*>(load_shared_long(at));
        if constexpr (W::kBlocks) {
            rows.scales = reinterpret_cast<const unsigned char*>(load_shared_long(at + 8 * kThreads));
        }
        if constexpr (W::kPoints) {
            rows.zero_points = reinterpret_cast<const unsigned char*>(load_shared_long(at + 16 * kThreads));
        }
        load_shared<1>(at + 24 * kThreads, &rows.present);
    }

    // Begin to read a step of the rows into the present stage and move on.
    __device__ __forceinline__ void read(int step, int in_features) {
        using F = typename W::Format;
        const int inner = kStepInner * step + kLaneCodes * static_cast<int>(thread % 4);
        const int bytes = min(max(in_features - inner, 0), kLaneCodes) / 8 * F::kBits;
        // Where nothing is read the address must be one nevertheless.
        const unsigned char* source = rows.codes + (bytes ? static_cast<unsigned>(inner) / 8 * F::kBits : 0u);
        const unsigned to = stage_address(stage) + thread * W::kPieceBytes;
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            copy_codes<W>(to + i * W::kPieces * S::kPieceStride, S::kPieceStride,
                          source + (rows.has(i) ? rows.codes_offset(i) : 0), rows.has(i) ? bytes : 0);
        }
        copy_commit();
        load_scales<W>(rows, inner, in_features, pending);
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
                unsigned scales[kLaneRows], points = 0;
#pragma unroll
                for (int row = 0; row < kLaneRows; ++row) {
                    scales[row] = stored_scale<W, Half>(pending.scales[row][i]);
                    points |= static_cast<unsigned>(pending.zero_points[row][i]) << (8 * row);
                }
                store_shared_quad(at + S::kScales + 16 * (i * kThreads + thread), scales);
                if constexpr (W::kPoints) {
                    store_shared(at + S::kPoints + 4 * (i * kThreads + thread), points);
                }
            }
        }
    }

    // The scales and zero points of one panel of a band in the present stage.
    template <int panel, int band>
    __device__ __forceinline__ void load_decoders(Decoder<W, Half>& lower, Decoder<W, Half>& upper) const {
        const unsigned at = stage_address(stage);
        constexpr int kScale = W::kScales == 2 ? panel : 0;
        lower.zero_point = upper.zero_point = 1u << (W::Format::kBits - 1);
        if constexpr (W::kBlocks) {
            unsigned scales[2];
            load_shared<2>(at + S::kScales + 16 * (kScale * kThreads + thread) + 8 * band, scales);
            lower.scale = scales[0], upper.scale = scales[1];
        }
        if constexpr (W::Format::kZeroPoints) {
            unsigned points[1] = {row_points};
            if constexpr (W::kPoints) {
                load_shared<1>(at + S::kPoints + 4 * (kScale * kThreads + thread), points);
            }
            lower.zero_point = points[0] >> (16 * band) & 0xffu;
            upper.zero_point = points[0] >> (16 * band + 8) & 0xffu;
        }
    }

    // The codes of one panel of row `row` in the present stage.
    template <int panel>
    __device__ __forceinline__ void load_codes(int row, unsigned (&words)[kPanelWords<W::Format::kBits>]) const {
        constexpr int kBits = W::Format::kBits;
        constexpr int kByte = kBits == 1 ? 0 : kBits == 3 ? 4 * panel : 2 * kBits * panel;
        const unsigned at = stage_address(stage) + (row * W::kPieces + kByte / W::kPieceBytes) * S::kPieceStride +
                            thread * W::kPieceBytes + kByte % W::kPieceBytes;
        if constexpr (kBits == 3) {
            load_shared<1>(at, words);
            load_shared<1>(at + 4, words + 1);
        } else {
            load_shared<kPanelWords<kBits>>(at, words);
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

template <class W>
__device__ __forceinline__ unsigned source_address(unsigned base, unsigned warp, bool next) {
    return base + Stages<W>::kSources + 32 * warp + (next ? 16 : 0);
}

template <class W>
__device__ __forceinline__ TokenSource load_source(unsigned base, unsigned warp, bool next) {
    const unsigned at = source_address<W>(base, warp, next);
    unsigned bytes[1];
    load_shared<1>(at + 8, bytes);
    return TokenSource{reinterpret_cast<const unsigned char*>(load_shared_long(at)), bytes[0]};
}

// Multiply a warp's two bands of 16 weight rows (of lane 4g + c, row g and row g + 8 of each) with the tokens of a
// tile. Products are issued in batches of four, half a step of one band, because the tensor cores lose time when they
// change from one accumulator to another; while one warpgroup's batch runs, the other decodes its next. `ahead` says
// that whole stages were read before and that later ones, of the next item too, are to be read on the way.
template <class W, class Half, int Tokens>
__device__ __forceinline__ void multiply(Ring<Stages<W>::kSlots> ring, RingPlace<Stages<W>::kSlots>& place,
                                         Reader<W, Half>& reader, int in_features, bool ahead, long long panel_bytes,
                                         float (&result)[kBands][Tokens / 2]) {
    // Addresses are computed here for each width, not once for all, which would cost registers.
    ring.base = reader.base = opaque(reader.base);
    const unsigned thread = reader.thread = opaque(threadIdx.x);
    const int steps = padded_steps(in_features);
#pragma unroll
    for (int i = 0; i < kBands * Tokens / 2; ++i) {
        result[i % kBands][i / kBands] = 0.0f;
        pin(result[i % kBands][i / kBands]);  // else it may be zeroed while the other band's products run
    }
    unsigned fragments[16];
    for (int step = 0; step < steps; ++step) {
        if (ahead) {
            copy_wait<Stages<W>::kDepth - 1>();
        } else {
            copy_wait<0>();
        }
        if (thread % (32 * kWarps) == step % kWarps * 32u) {  // the warps take turns
            const int lead = ahead ? Stages<W>::kLead : 0;
            const bool next = step + lead >= steps;
            const TokenSource source = load_source<W>(ring.base, thread / 32, next);
            if (source.bytes) {
                feed(ring, place, lead, source, panel_bytes, step + lead - (next ? steps : 0));
            }
        }
        __syncwarp();
        barrier_wait(ring.full_barrier(place.slot), place.parity);
        const unsigned long long tokens = token_descriptor(ring.tokens(place.slot));
        const auto batch = [&]<int panel, int band>() {
            unsigned lower[kPanelWords<W::Format::kBits>], upper[kPanelWords<W::Format::kBits>];
            reader.template load_codes<panel>(2 * band, lower);
            reader.template load_codes<panel>(2 * band + 1, upper);
            Decoder<W, Half> lower_decoder, upper_decoder;
            reader.template load_decoders<panel, band>(lower_decoder, upper_decoder);
            wgmma_wait<0>();  // the fragments are free again
            decode_panel<panel>(lower_decoder, upper_decoder, lower, upper, fragments);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                TensorProduct<Half, Tokens>::run(result[band], fragments + 4 * i,
                                                 tokens + panel * (Tokens * kPanelRowBytes / 16) + 2 * i);
            }
            wgmma_commit();
        };
        batch.template operator()<0, 0>();
        batch.template operator()<0, 1>();
        // The products of the step before are complete now: its slot may be filled again.
        if (step > 0 && thread % 32 == 0) {
            barrier_arrive(ring.empty_barrier(place.previous()));
        }
        batch.template operator()<1, 0>();
        batch.template operator()<1, 1>();
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
    if (thread % 32 == 0) {
        barrier_arrive(ring.empty_barrier(place.previous()));
    }
#pragma unroll
    for (int i = 0; i < kBands * Tokens / 2; ++i) {
        pin(result[i % kBands][i / kBands]);
    }
}

// A block's shared memory and its walk over its items.
template <class W, class Half>
struct Block {
    using S = Stages<W>;
    Ring<S::kSlots> ring;
    RingPlace<S::kSlots> place;
    Reader<W, Half> reader;

    // Multiply every item's weight rows with its tokens: rows(work) gives a lane's rows; tile is called with the width
    // in tokens as a template argument, to multiply and store.
    template <class Rows, class Tile>
    __device__ __forceinline__ void run(const unsigned char* image, long long image_rows, const GroupTile* tiles,
                                        const int* tile_count, int row_tiles, int in_features, const Rows& rows,
                                        const Tile& tile) {
        const bool ahead = padded_steps(in_features) >= S::kDepth;
        for (int item = blockIdx.x; item < *tile_count * row_tiles; item += gridDim.x) {
            const int next = item + static_cast<int>(gridDim.x);
            const bool last = next >= *tile_count * row_tiles;
            const Work work = work_item(tiles, *tile_count, row_tiles, item);
            const Work next_work = last ? work : work_item(tiles, *tile_count, row_tiles, next);
            keep(work, token_source(image, work), last ? TokenSource{} : token_source(image, next_work));
            if (ahead) {
                reader.keep_next(rows(next_work));
            }
            if constexpr (W::kRowPoints) {
                reader.row_points = rows(work).row_zero_points;
            }
            if (!ahead || item == static_cast<int>(blockIdx.x)) {
                begin(rows(work), in_features, ahead, image_rows * kPanelRowBytes);
            }
            switch (tile_width(work.count)) {
                case 16: tile.template operator()<16>(*this, ahead); break;
                case 64: tile.template operator()<64>(*this, ahead); break;
                default: tile.template operator()<128>(*this, ahead); break;
            }
        }
        copy_wait<0>();
    }

    __device__ __forceinline__ static TokenSource token_source(const unsigned char* image, const Work& work) {
        return TokenSource{image + image_row(work.first, work.expert) * kPanelRowBytes,
                           static_cast<unsigned>(tile_width(work.count) * kPanelRowBytes)};
    }

    // Read and feed the first steps of an item that nobody read ahead for.
    __device__ __forceinline__ void begin(const LaneRows& rows, int in_features, bool ahead, long long panel_bytes) {
        reader.rows = rows;
        reader.stage = 0;
        for (int step = 0; step < min(S::kDepth, padded_steps(in_features)); ++step) {
            reader.read(step, in_features);
            reader.settle();
        }
        reader.stage = 0;
        if (ahead && threadIdx.x == 0) {
            for (int step = 0; step < S::kLead; ++step) {
                feed(ring, place, step, load_source<W>(ring.base, 0, false), panel_bytes, step);
            }
        }
    }

    template <int Tokens>
    __device__ __forceinline__ void multiply_tile(int in_features, bool ahead, long long image_rows,
                                                  float (&result)[kBands][Tokens / 2]) {
        multiply<W, Half, Tokens>(ring, place, reader, in_features, ahead, image_rows * kPanelRowBytes, result);
    }

    __device__ __forceinline__ unsigned work_address() const { return ring.base + S::kWorks + threadIdx.x / 32 * 16; }

    // What is known about the warp's work item is kept in shared memory, out of registers, while it multiplies.
    __device__ __forceinline__ void keep(const Work& work, const TokenSource& own, const TokenSource& next) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            const unsigned at = source_address<W>(ring.base, threadIdx.x / 32, false);
            store_shared_long(at, reinterpret_cast<unsigned long long>(own.first));
            store_shared(at + 8, own.bytes);
            store_shared_long(at + 16, reinterpret_cast<unsigned long long>(next.first));
            store_shared(at + 24, next.bytes);
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

template <class W, class Half>
__device__ __forceinline__ Block<W, Half> make_block() {
    using S = Stages<W>;
    const unsigned base = (dynamic_shared_address() + 1023u) & ~1023u;
    const Ring<S::kSlots> ring{base};
    if (threadIdx.x == 0) {
        store_shared(base + S::kUnfit, 0);
        ring.initialise();
    }
    __syncthreads();
    dependent_begin();
    return Block<W, Half>{ring, {}, {base, threadIdx.x}};
}

}  // namespace qmoe::prefill

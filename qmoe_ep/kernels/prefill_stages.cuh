// A block's ring of stages in shared memory, and the warps that fill it.
//
// A stage holds one step of an item: the tile's tokens as the tensor cores read them, and each lane's weight rows. Four
// warps do nothing but fill stages; eight multiply. A stage is passed on through two barriers: `full` when the copies
// have arrived, `empty` when its products are complete.

#pragma once

#include "prefill_arguments.cuh"
#include "prefill_pipeline.cuh"

namespace qmoe::prefill {

constexpr int kSharedBytes = 224 << 10;  // dynamic, from an address that is a multiple of 1024

// Place in the ring, with the parity of its present round.
template <int Depth>
struct RingPlace {
    int slot = 0;
    unsigned parity = 0;

    __device__ __forceinline__ int previous() const { return slot == 0 ? Depth - 1 : slot - 1; }

    __device__ __forceinline__ void advance() {
        if (++slot == Depth) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// How shared memory is divided, for weights W and tiles of a width. Each lane's part of a stage is its own: codes in pieces, then scales,
// then zero points, so that lanes read side by side.
template <class W, int Tokens>
struct Stages {
    static constexpr int kTokens = Tokens;
    static constexpr int kTokenBytes = Tokens * kStepInner * 2;
    static constexpr int kBytes = kTokenBytes + kLanes * W::kLaneBytes;
    static constexpr int kBarrierBytes = 256;
    static constexpr int kFitting = (kSharedBytes - kBarrierBytes) / kBytes;
    static constexpr int kDepth = kFitting < 8 ? kFitting : 8;
    static_assert(kDepth >= 3, "one stage is multiplied, two are on their way");
    // Steps whose copies are in flight while older ones are awaited.
    static constexpr int kLag = kDepth - 3 < 1 ? 1 : kDepth - 3 > 3 ? 3 : kDepth - 3;

    static constexpr int kPieceStride = kLanes * W::kPieceBytes;
    static constexpr int kScales = kLaneRows * W::kRowBytes * kLanes;
    static constexpr int kPoints = kScales + (W::kBlocks ? 16 * W::kScales * kLanes : 0);

    unsigned base;  // shared address, a multiple of 1024

    __device__ __forceinline__ unsigned tokens(int slot) const { return base + kBytes * slot; }
    __device__ __forceinline__ unsigned weights(int slot) const { return tokens(slot) + kTokenBytes; }
    __device__ __forceinline__ unsigned full(int slot) const { return base + kDepth * kBytes + 8 * slot; }
    __device__ __forceinline__ unsigned empty(int slot) const { return full(slot + kDepth); }

    // A flag: a value was met that Half can't hold.
    __device__ __forceinline__ unsigned unfit() const { return full(2 * kDepth); }
    __device__ __forceinline__ void note_unfit() const { store_shared(unfit(), 1); }

    // By all threads of a block at its begin.
    __device__ __forceinline__ static Stages made() {
        const Stages stages{(dynamic_shared_address() + 1023u) & ~1023u};
        if (threadIdx.x == 0) {
            for (int slot = 0; slot < kDepth; ++slot) {
                barrier_init(stages.full(slot), kFeeders);
                barrier_init(stages.empty(slot), kWarps);
            }
            store_shared(stages.unfit(), 0);
            barrier_init_fence();
        }
        __syncthreads();
        return stages;
    }

    // By all threads at a block's end: have the exact kernels run if it met values that Half can't hold.
    __device__ __forceinline__ void report(int* exact_tile_count, int exact_tiles) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned noted[1];
            load_shared<1>(unfit(), noted);
            if (noted[0]) {
                *exact_tile_count = exact_tiles;
            }
        }
    }
};

// What is copied next: a step, or -1, of a tile of `count` tokens, from the vectors at `tokens`.
struct FeederStep {
    const unsigned char* tokens;
    int count;
    int step;
};

// One of the threads that fill stages. It copies the weights of two lanes and a 16-byte column of every eighth token. A
// step's scales go through its registers, and are stored some steps later, when the step's copies have arrived, too.
template <class W, class Half, int Tokens>
struct Feeder {
    using S = Stages<W, Tokens>;
    static constexpr int kOwnLanes = 2;
    static_assert(kOwnLanes * kFeeders == kLanes);
    static constexpr int kOwnTokens = Tokens / 8;
    S stages;
    RingPlace<S::kDepth> place;  // of the step that is copied next
    int oldest;                  // slot of the oldest step that isn't passed on
    int turns, idle_turns;
    int thread;  // of the feeders
    LaneRows rows;
    unsigned token_unit;  // where a token begins, in units of 16 bytes: see own_token
    PendingScales<W> pending[S::kLag][kOwnLanes];

    __device__ __forceinline__ explicit Feeder(const S& own)
        : stages(own), oldest(0), turns(0), idle_turns(0), thread(static_cast<int>(threadIdx.x) - kLanes) {}

    // The token whose place this lane knows; those that a warp copies are in its lanes, two neighbours for each eight.
    __device__ __forceinline__ int own_token() const {
        return 8 * (thread % 32 / 2) + 2 * (thread / 32) + thread % 2;
    }

    // Fill stages, step by step. next(*this) moves on to the next one and says which that is.
    template <class Next>
    __device__ __forceinline__ void run(int in_features, const Next& next) {
        while (idle_turns < S::kLag) {
            turn<0>(in_features, next);
            if constexpr (S::kLag > 1) {
                turn<1>(in_features, next);
            }
            if constexpr (S::kLag > 2) {
                turn<2>(in_features, next);
            }
        }
    }

    // Copy a step, if there is one, and pass on the one kLag steps before, whose scales are in the same registers.
    template <int set, class Next>
    __device__ __forceinline__ void turn(int in_features, const Next& next) {
        const FeederStep step = next(*this);
        const int inner = kStepInner * step.step + kLaneCodes * (thread % 4);
        if (step.step >= 0) {
            barrier_wait(stages.empty(place.slot), place.parity ^ 1u);
            copy_tokens(step.tokens + 2 * kStepInner * step.step, step.count);
            copy_weights(inner, in_features);
            place.advance();
        } else {
            ++idle_turns;
        }
        copy_commit();
        if (turns >= S::kLag && idle_turns <= S::kLag) {
            copy_wait<S::kLag>();
            pass_on(oldest, pending[set]);
            oldest = oldest + 1 == S::kDepth ? 0 : oldest + 1;
        }
        ++turns;
        if (step.step >= 0) {
            load_scales<W, 0>(rows, inner, in_features, pending[set][0]);
            load_scales<W, 1>(rows, inner, in_features, pending[set][1]);
        }
    }

    __device__ __forceinline__ void copy_tokens(const unsigned char* source, int count) const {
        const int piece = thread % 16, first = thread / 16;
        const unsigned to = stages.tokens(place.slot) + piece / 8 * (Tokens * kPanelRowBytes) + first * kPanelRowBytes +
                            ((piece % 8) ^ first) * 16;
#pragma unroll
        for (int i = 0; i < kOwnTokens; ++i) {
            const unsigned unit = __shfl_sync(kAllLanes, token_unit, 2 * i + thread % 32 / 16);
            if (8 * i + first < count) {
                copy_async<16>(to + 8 * kPanelRowBytes * i, source + 16ull * (unit + piece), 16);
            }
        }
    }

    __device__ __forceinline__ void copy_weights(int inner, int in_features) const {
        using F = typename W::Format;
        const int bytes = min(max(in_features - inner, 0), kLaneCodes) / 8 * F::kBits;
        // Where nothing is read the address must be one nevertheless.
        const unsigned char* source = rows.codes + (bytes ? static_cast<unsigned>(inner) / 8 * F::kBits : 0u);
#pragma unroll
        for (int i = 0; i < kOwnLanes * kLaneRows; ++i) {
            const unsigned to = stages.weights(place.slot) + (thread + i / kLaneRows * kFeeders) * W::kPieceBytes +
                                i % kLaneRows * W::kPieces * S::kPieceStride;
            copy_codes<W>(to, S::kPieceStride, source + (rows.has(i) ? rows.codes_offset(i) : 0),
                          rows.has(i) ? bytes : 0);
        }
    }

    // Store the scales that were read for a stage whose copies have arrived, and hand it over.
    __device__ __forceinline__ void pass_on(int slot, const PendingScales<W> (&scales)[kOwnLanes]) const {
        if constexpr (W::kBlocks) {
#pragma unroll
            for (int i = 0; i < kOwnLanes; ++i) {
                store_scales(scales[i], stages.weights(slot), thread + kFeeders * i);
            }
        }
        tensor_fence();
        barrier_arrive(stages.full(slot));
    }

    __device__ __forceinline__ void store_scales(const PendingScales<W>& own, unsigned to, int lane) const {
        if (!scales_fit<W, Half>(own)) {
            stages.note_unfit();
        }
#pragma unroll
        for (int i = 0; i < W::kScales; ++i) {
            unsigned scales[kLaneRows], points = 0;
#pragma unroll
            for (int row = 0; row < kLaneRows; ++row) {
                scales[row] = stored_scale<W, Half>(own.scales[row][i]);
                points |= static_cast<unsigned>(own.zero_points[row][i]) << (8 * row);
            }
            store_shared_quad(to + S::kScales + 16 * (i * kLanes + lane), scales);
            if constexpr (W::kPoints) {
                store_shared(to + S::kPoints + 4 * (i * kLanes + lane), points);
            }
        }
    }
};

}  // namespace qmoe::prefill

// Tokens on their way to the tensor cores: a ring of shared-memory slots, filled by bulk copies.

#pragma once

#include "prefill_arguments.cuh"
#include "prefill_pipeline.cuh"

namespace qmoe::prefill {

constexpr int kSlotBytes = kTileTokens * kStepInner * 2;

// Place in a ring of slots, with the parity of its present round.
template <int Slots>
struct RingPlace {
    int slot = 0;
    unsigned parity = 0;

    __device__ __forceinline__ int previous() const { return slot == 0 ? Slots - 1 : slot - 1; }

    __device__ __forceinline__ void advance() {
        if (++slot == Slots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// The ring in shared memory. Warps wait for `full`, the feeder for `empty`.
template <int Slots>
struct Ring {
    static constexpr int kBytes = Slots * (kSlotBytes + 16);
    unsigned base;  // shared address, a multiple of 1024

    __device__ __forceinline__ unsigned tokens(int slot) const { return base + kSlotBytes * slot; }
    __device__ __forceinline__ unsigned full_barrier(int slot) const { return base + Slots * kSlotBytes + 8 * slot; }
    __device__ __forceinline__ unsigned empty_barrier(int slot) const { return full_barrier(slot + Slots); }

    // By one thread, before a barrier of the block.
    __device__ __forceinline__ void initialise() const {
        for (int slot = 0; slot < Slots; ++slot) {
            barrier_init(full_barrier(slot), 1);
            barrier_init(empty_barrier(slot), kWarps);
        }
        barrier_init_fence();
    }
};

// Where a work item's tokens lie in the image, kept in shared memory by every warp.
struct TokenSource {
    const unsigned char* first;  // of panel 0
    unsigned bytes;              // of its part of a panel; 0 if there is no item
};

// By one lane: feed a step of an item into the slot `ahead` places after `place`, once that is empty.
template <int Slots>
__device__ __forceinline__ void feed(const Ring<Slots>& ring, const RingPlace<Slots>& place, int ahead,
                                     const TokenSource& tokens, long long panel_bytes, int step) {
    const int beyond = place.slot + ahead;
    const int slot = beyond >= Slots ? beyond - Slots : beyond;
    const unsigned parity = beyond >= Slots ? place.parity ^ 1u : place.parity;
    const unsigned full = ring.full_barrier(slot), to = ring.tokens(slot);
    const unsigned char* source = tokens.first + 2 * step * panel_bytes;
    barrier_wait(ring.empty_barrier(slot), parity ^ 1u);
    barrier_arrive_expect(full, 2 * tokens.bytes);
    bulk_copy(to, source, tokens.bytes, full);
    bulk_copy(to + tokens.bytes, source + panel_bytes, tokens.bytes, full);
}

}  // namespace qmoe::prefill

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

// Feeds the tokens of the block's work items into the ring, a step at a time. The first lane of the block works it
// between its own steps, so that no warp and none of its registers stand idle; its state lives in shared memory.
template <int Slots>
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
    __device__ __forceinline__ void advance(const Ring<Slots>& ring) {
        while (item < items && ahead < Slots) {
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
            if (++slot == Slots) {
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

}  // namespace qmoe::prefill

// Shared-memory pipeline of the prefill kernels: barriers, bulk copies and the register transposition.

#pragma once

#include "float_types.cuh"

namespace qmoe {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Make initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// Arrive, and expect `bytes` from the copy engine before the phase ends.
__device__ __forceinline__ void barrier_arrive_expect(unsigned barrier, unsigned bytes) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// Wait for the end of the phase of this parity.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Whether the phase of this parity has ended.
__device__ __forceinline__ bool barrier_test(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

// Copy `bytes`, a multiple of 16, between addresses aligned to 16; completes on the barrier.
__device__ __forceinline__ void bulk_copy(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Transpose an 8 x 8 matrix of halves over a warp: lane 4i + j holds columns 2j and 2j + 1 of row i, before and after.
__device__ __forceinline__ unsigned transpose_halves(unsigned pair) {
    unsigned result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

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

}  // namespace qmoe

// Shared-memory pipeline of the prefill kernels: barriers, bulk copies and the register transposition.

#pragma once

#include "float_types.cuh"

namespace qmoe {

// Address of the dynamic shared memory.
__device__ __forceinline__ unsigned dynamic_shared_address() {
    extern __shared__ unsigned char dynamic_shared[];
    return static_cast<unsigned>(__cvta_generic_to_shared(dynamic_shared));
}

// Let the launch after this one begin.
__device__ __forceinline__ void dependent_launch() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Wait until the launch before this one has ended and its writes can be seen.
__device__ __forceinline__ void dependent_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void dependent_begin() {
    dependent_launch();
    dependent_wait();
}

// Give up, or take, registers of each thread, by whole warpgroups: multiples of 8, from what others gave up.
template <int Count>
__device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// Let the tensor cores see what this thread wrote to shared memory.
__device__ __forceinline__ void tensor_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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

// Copy `Bytes`, or zeros if `present` is 0, to shared memory in the background; for this thread alone to wait for.
template <int Bytes>
__device__ __forceinline__ void copy_async(unsigned destination, const void* source, int present) {
    if constexpr (Bytes == 16) {
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
                     "r"(present)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(destination), "l"(source),
                     "n"(Bytes), "r"(present)
                     : "memory");
    }
}

// Load what will never change, and have the second-level cache fetch what comes after it.
__device__ __forceinline__ float load_streamed(const float* source) {
    float value;
    asm volatile("ld.global.nc.L2::256B.f32 %0, [%1];" : "=f"(value) : "l"(source));
    return value;
}
__device__ __forceinline__ unsigned short load_streamed(const unsigned short* source) {
    unsigned short value;
    asm volatile("ld.global.nc.L2::256B.u16 %0, [%1];" : "=h"(value) : "l"(source));
    return value;
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `Pending` committed groups of this thread's copies are in flight.
template <int Pending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

__device__ __forceinline__ void store_shared(unsigned address, unsigned value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_quad(unsigned address, const unsigned (&values)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(values[0]), "r"(values[1]),
                 "r"(values[2]), "r"(values[3])
                 : "memory");
}

// Load `Words` (1, 2 or 4) consecutive words of shared memory.
template <int Words>
__device__ __forceinline__ void load_shared(unsigned address, unsigned* to) {
    if constexpr (Words == 4) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
    } else if constexpr (Words == 2) {
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(address) : "memory");
    } else {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(address) : "memory");
    }
}

// Transpose an 8 x 8 matrix of halves over a warp: lane 4i + j holds columns 2j and 2j + 1 of row i, before and after.
__device__ __forceinline__ unsigned transpose_halves(unsigned pair) {
    unsigned result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

}  // namespace qmoe

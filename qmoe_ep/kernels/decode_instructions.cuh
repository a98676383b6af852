// The instructions of compute capability 8.0 and newer that the decode kernels use, one function each.
//
// Everything that CUDA C++ has no name for is here, so that the code above it can be read, and run elsewhere, without
// assembly. Shared memory is addressed by its own 32-bit addresses where that saves instructions.

#pragma once

namespace qmoe::decode {

// Dynamic shared memory of the block, aligned to 16 bytes.
__device__ __forceinline__ char* shared_memory() {
    extern __shared__ uint4 memory[];
    return reinterpret_cast<char*>(memory);
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copy Bytes from source + Offset in global memory to target + Shift in shared memory in the background; where not
// `present`, zeros, and nothing is read.
template <int Bytes, int Offset = 0, int Shift = 0>
__device__ __forceinline__ void copy_async(unsigned target, const void* source, bool present) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
    const int count = present ? Bytes : 0;
    if constexpr (Bytes == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %3], [%1 + %4], 16, %2;" ::"r"(target), "l"(source),
                     "r"(count), "n"(Shift), "n"(Offset)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global.L2::128B [%0 + %4], [%1 + %5], %2, %3;" ::"r"(target), "l"(source),
                     "n"(Bytes), "r"(count), "n"(Shift), "n"(Offset)
                     : "memory");
    }
}

// The same of four bytes of which only `count` are there.
__device__ __forceinline__ void copy_async_part(unsigned target, const void* source, int count) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(count)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most Pending of this thread's groups of copies are under way.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Words of shared memory, at an address aligned to as many bytes.
__device__ __forceinline__ void load_shared(unsigned address, unsigned (&words)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
}

__device__ __forceinline__ void load_shared(unsigned address, unsigned (&words)[2]) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address));
}

__device__ __forceinline__ void load_shared(unsigned address, unsigned (&words)[1]) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(address));
}

__device__ __forceinline__ unsigned short load_shared_half(unsigned address) {
    unsigned short value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ unsigned load_shared_byte(unsigned address) {
    unsigned value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

// Sixteen bytes of shared memory where `active`; elsewhere the registers keep what they hold.
__device__ __forceinline__ void load_shared_if(bool active, unsigned address, unsigned (&words)[4]) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %5, 0;\n\t@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
        : "r"(address), "r"(static_cast<int>(active)));
}

// c[16 x 8] += a[16 x 16] b[16 x 8] on halves, accumulated in float; fragments as the instruction lays them out.
__device__ __forceinline__ void multiply_accumulate(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                    unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two halves at once: a b + c.
__device__ __forceinline__ unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
    unsigned result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// Two floats rounded to two halves, the first in the lower half.
__device__ __forceinline__ unsigned round_to_halves(float first, float second) {
    unsigned result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
    return result;
}

// Four floats past the first-level cache, which doesn't see what a kernel that still runs writes.
__device__ __forceinline__ float4 load_fresh(const float* source) {
    return __ldcg(reinterpret_cast<const float4*>(source));
}

// A word past the first-level cache.
__device__ __forceinline__ int load_fresh(const int* source) { return __ldcg(source); }

// Programmatic dependent launch: wait until the kernels before have finished and their writes can be seen; let the
// next one start. Without such a launch both do nothing.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace qmoe::decode

// The instructions beside those of decode_instructions.cuh that the grouped kernels use.

#pragma once

#include "decode_instructions.cuh"
#include "float_types.cuh"

namespace qmoe::grouped {

// c[16 x 8] += a[16 x 16] b[16 x 8] on bfloat16, accumulated in float; fragments as the instruction lays them out.
__device__ __forceinline__ void multiply_accumulate_bfloats(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                                            unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two bfloat16 at once: a b + c.
__device__ __forceinline__ unsigned fma_bfloats(unsigned a, unsigned b, unsigned c) {
    unsigned result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// Two floats rounded to two bfloat16, the first in the lower half.
__device__ __forceinline__ unsigned round_to_bfloats(float first, float second) {
    unsigned result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
    return result;
}

// Sixteen bytes past the first-level cache, which doesn't see what a kernel that still runs writes.
__device__ __forceinline__ int4 load_fresh(const int4* source) { return __ldcg(source); }
__device__ __forceinline__ int load_fresh(const int* source) { return __ldcg(source); }

}  // namespace qmoe::grouped

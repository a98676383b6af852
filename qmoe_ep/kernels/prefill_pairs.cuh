// Arithmetic on pairs of halves, and the fast sigmoid.

#pragma once

#include "float_types.cuh"

namespace qmoe {

// Arithmetic on two halves in a register.
template <class Half>
struct PairMath;

template <>
struct PairMath<Float16> {
    static constexpr unsigned kBias = 15, kMantissa = 10;
    __device__ static __forceinline__ unsigned add(unsigned a, unsigned b) {
        unsigned d;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    __device__ static __forceinline__ unsigned mul(unsigned a, unsigned b) {
        unsigned d;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    __device__ static __forceinline__ unsigned fma(unsigned a, unsigned b, unsigned c) {
        unsigned d;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
        return d;
    }
    __device__ static __forceinline__ unsigned pack(float low, float high) {
        unsigned d;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
        return d;
    }
};

template <>
struct PairMath<BFloat16> {
    static constexpr unsigned kBias = 127, kMantissa = 7;
    __device__ static __forceinline__ unsigned add(unsigned a, unsigned b) {
        unsigned d;
        asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    __device__ static __forceinline__ unsigned mul(unsigned a, unsigned b) {
        unsigned d;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    __device__ static __forceinline__ unsigned fma(unsigned a, unsigned b, unsigned c) {
        unsigned d;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
        return d;
    }
    __device__ static __forceinline__ unsigned pack(float low, float high) {
        unsigned d;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
        return d;
    }
};

// 1 / (1 + exp(-x)) with the hardware's exponential and reciprocal, each accurate to about 2^-22 of its value: far
// finer than the half that the activated feature is rounded to. Infinities and NaN come out as from exact functions.
__device__ __forceinline__ float fast_sigmoid(float x) {
    float power, result;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
}

}  // namespace qmoe

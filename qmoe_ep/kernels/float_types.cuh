// The float types of operands, with exact conversion to float and rounding to nearest even from float.
//
// Float16 and BFloat16 hold the bits alone. Their conversions need no half-precision header, so that a module which
// only reads and writes half operands compiles without one; arithmetic on halves is not defined here.

#pragma once

namespace qmoe {

struct alignas(2) Float16 {
    unsigned short bits;
};

struct alignas(2) BFloat16 {
    unsigned short bits;
};

// Whether an operand's type says that it is absent.
template <class T>
constexpr bool kIsVoid = false;
template <>
inline constexpr bool kIsVoid<void> = true;

template <class A, class B>
constexpr bool kSameType = false;
template <class A>
inline constexpr bool kSameType<A, A> = true;

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

__device__ __forceinline__ float to_float(float value) { return value; }

__device__ __forceinline__ float to_float(Float16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}

__device__ __forceinline__ float to_float(BFloat16 value) {
    return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

template <class T>
__device__ __forceinline__ T from_float(float value);

template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}

template <>
__device__ __forceinline__ Float16 from_float<Float16>(float value) {
    Float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return BFloat16{static_cast<unsigned short>((bits >> 16) | 0x40u)};  // a NaN stays one when cut short
    }
    return BFloat16{static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

}  // namespace qmoe

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

// 8-bit floats, of weights and their scales: a power of two, and sign, 4 bits of exponent, 3 of mantissa, no infinity.
struct E8M0 {
    unsigned char bits;
};

struct E4M3 {
    unsigned char bits;
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

__device__ __forceinline__ float to_float(E8M0 value) {
    const unsigned bits = value.bits;
    return __uint_as_float(bits == 0xffu ? 0x7fffffffu : bits == 0u ? 0x00400000u : bits << 23);
}

// The exponent is biased by 7: in the place of a float's, whose bias is 127, the bits are 2^120 too small, also where
// they are subnormal.
__device__ __forceinline__ float to_float(E4M3 value) {
    const unsigned bits = value.bits;
    if ((bits & 0x7fu) == 0x7fu) {
        return __uint_as_float(0x7fffffffu);
    }
    constexpr float kBias = __builtin_bit_cast(float, (127u + 120u) << 23);
    return __uint_as_float((bits & 0x80u) << 24 | (bits & 0x7fu) << 20) * kBias;
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

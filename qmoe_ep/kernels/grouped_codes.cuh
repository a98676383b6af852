// Codes less their zero points as exact 16-bit floats, in the order in which a tensor core takes them.
//
// A lane's codes of a run are taken in subgroups of Sub codes, of which pair i holds codes i and i + Sub / 2: a
// subgroup's halves lie 16 bits apart in a register, and one logic operation takes pair i out of it. Or-ing 2^m, with
// as many bits as the type's mantissa has, makes it 2^m + code 2^s, where s is the place of the code, and one fused
// multiply-add the difference, exactly. Activations are laid out in the same order.
//
// Bfloat16 holds activations near the largest float, of which a sum of products with codes would overflow. There the
// differences are made 2^-Down times as large, also exactly.

#pragma once

#include "decode_codes.cuh"
#include "grouped_instructions.cuh"

namespace qmoe::grouped {

using decode::kBothHalves;

// The two element types of products: bits of the mantissa, of 2^m and of 1.
struct Halves {
    static constexpr int kMantissa = 10;
    static constexpr unsigned kImplied = 0x6400;
    static constexpr unsigned kOne = 0x3c00;
    static __device__ __forceinline__ unsigned fma(unsigned a, unsigned b, unsigned c) {
        return decode::fma_halves(a, b, c);
    }
    static __device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        decode::multiply_accumulate(c, a[0], a[1], a[2], a[3], b0, b1);
    }
};

struct BFloats {
    static constexpr int kMantissa = 7;
    static constexpr unsigned kImplied = 0x4300;
    static constexpr unsigned kOne = 0x3f80;
    static __device__ __forceinline__ unsigned fma(unsigned a, unsigned b, unsigned c) { return fma_bfloats(a, b, c); }
    static __device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        multiply_accumulate_bfloats(c, a[0], a[1], a[2], a[3], b0, b1);
    }
};

// Codes of a subgroup: as many as fill a register with two halves, or all that a lane has of a run.
template <int Bits, int LaneCodes>
constexpr int kSubgroup = Bits == 8 ? 4 : Bits >= 3 ? (LaneCodes < 8 ? LaneCodes : 8) : (LaneCodes < 16 ? LaneCodes : 16);

// How far the register is shifted for each pair: as seldom further as its codes fit the mantissa.
template <class Element, int Bits>
struct PairShifts {
    int of[8] = {};
    constexpr PairShifts() {
        for (int i = 1; i < 8; ++i) {
            of[i] = i * Bits - of[i - 1] + Bits > Element::kMantissa ? i * Bits : of[i - 1];
        }
    }
};
template <class Element, int Bits>
constexpr PairShifts<Element, Bits> kPairShifts;

// `bits` holds the subgroup from its lowest bit on, and zeros or anything above; `zero` is a zero point in both halves.
template <class Element, int Bits, int Sub, int Down>
__device__ __forceinline__ void decode_subgroup(unsigned bits, unsigned zero, unsigned (&pairs)[Sub / 2]) {
    constexpr int kHalfBits = Sub / 2 * Bits;
    constexpr unsigned kMask = (1u << Bits) - 1u;
    if constexpr (Bits == 8 && Element::kMantissa < 8) {
        constexpr float kScale = 1.0f / static_cast<float>(1 << Down);
        const float minus = (-8388608.0f - static_cast<float>(zero & 0xffffu)) * kScale;
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[i] = fmaf(__uint_as_float(__byte_perm(bits, 0x4b000000u, 0x7650 + i)), kScale, minus);
        }
        pairs[0] = round_to_bfloats(values[0], values[2]);
        pairs[1] = round_to_bfloats(values[1], values[3]);
    } else {
        unsigned both = bits;
        if constexpr (2 * kHalfBits <= 16) {
            both = bits | bits << (16 - kHalfBits);
        } else if constexpr (2 * kHalfBits < 32) {
            both = (bits & ((1u << kHalfBits) - 1u)) | (bits << (16 - kHalfBits) & ((1u << kHalfBits) - 1u) << 16);
        }
#pragma unroll
        for (int i = 0; i < Sub / 2; ++i) {
            const int shift = kPairShifts<Element, Bits>.of[i], s = i * Bits - shift;
            const unsigned code = (both >> shift & kMask * kBothHalves << s) | Element::kImplied * kBothHalves;
            const unsigned place = static_cast<unsigned>(s + Down) << Element::kMantissa;
            const unsigned minus = ((0x8000u | Element::kImplied) - place) * kBothHalves + (zero << s);
            pairs[i] = Element::fma(code, (Element::kOne - place) * kBothHalves, minus);
        }
    }
}

}  // namespace qmoe::grouped

// Codes as the first operand of a product of halves.
//
// A code of up to ten bits in the lowest bits of a half is the subnormal half code 2^-24, and s bits higher code 2^(s-24):
// one logic operation takes a pair of codes out of a word. Tensor cores multiply subnormal halves exactly. Products of
// different s go to accumulators of their own, which are put together by powers of two afterwards, and the zero point,
// zero point times the sum of the activations, is subtracted from the sum.
//
// Codes are taken in groups of whole words. A group yields pairs, which hold its codes i and i + kCodes / 2; kOrder says
// for which i the pairs come. Products take two pairs of equal s each.

#pragma once

#include "decode_instructions.cuh"

namespace qmoe::decode {

constexpr unsigned kBothHalves = 0x00010001u;

// What every group says: words and codes of it; shifts s of its classes of pairs; and, by decode, its pairs.
template <int Bits>
struct CodeGroup;

template <>
struct CodeGroup<8> {
    static constexpr int kWords = 1;
    static constexpr int kCodes = 4;
    static constexpr int kClasses = 1;
    static constexpr int kShift[kClasses] = {0};
    static constexpr int kClass[kCodes / 4] = {0};
    static constexpr int kOrder[kCodes / 2] = {0, 1};
    static __device__ __forceinline__ void decode(const unsigned* words, unsigned (&pair)[kCodes / 2]) {
        pair[0] = words[0] & 0x00ff00ffu;
        pair[1] = __byte_perm(words[0], 0u, 0x4341);
    }
};

template <>
struct CodeGroup<4> {
    static constexpr int kWords = 1;
    static constexpr int kCodes = 8;
    static constexpr int kClasses = 2;
    static constexpr int kShift[kClasses] = {0, 4};
    static constexpr int kClass[kCodes / 4] = {0, 1};
    static constexpr int kOrder[kCodes / 2] = {0, 2, 1, 3};
    static __device__ __forceinline__ void decode(const unsigned* words, unsigned (&pair)[kCodes / 2]) {
        const unsigned upper = words[0] >> 8;
        pair[0] = words[0] & 0x000f000fu;
        pair[1] = upper & 0x000f000fu;
        pair[2] = words[0] & 0x00f000f0u;
        pair[3] = upper & 0x00f000f0u;
    }
};

template <>
struct CodeGroup<2> {
    static constexpr int kWords = 1;
    static constexpr int kCodes = 16;
    static constexpr int kClasses = 4;
    static constexpr int kShift[kClasses] = {0, 2, 4, 6};
    static constexpr int kClass[kCodes / 4] = {0, 1, 2, 3};
    static constexpr int kOrder[kCodes / 2] = {0, 4, 1, 5, 2, 6, 3, 7};
    static __device__ __forceinline__ void decode(const unsigned* words, unsigned (&pair)[kCodes / 2]) {
        const unsigned upper = words[0] >> 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pair[2 * i] = words[0] & 0x00030003u << 2 * i;
            pair[2 * i + 1] = upper & 0x00030003u << 2 * i;
        }
    }
};

template <>
struct CodeGroup<1> {
    static constexpr int kWords = 1;
    static constexpr int kCodes = 32;
    static constexpr int kClasses = 4;
    static constexpr int kShift[kClasses] = {0, 2, 4, 6};
    static constexpr int kClass[kCodes / 4] = {0, 0, 1, 1, 2, 2, 3, 3};
    static constexpr int kOrder[kCodes / 2] = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};
    static __device__ __forceinline__ void decode(const unsigned* words, unsigned (&pair)[kCodes / 2]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pair[4 * i] = words[0] & kBothHalves << 2 * i;
            pair[4 * i + 1] = words[0] >> 8 & kBothHalves << 2 * i;
            pair[4 * i + 2] = words[0] >> 1 & kBothHalves << 2 * i;
            pair[4 * i + 3] = words[0] >> 9 & kBothHalves << 2 * i;
        }
    }
};

// Ninety-six bits: codes 0 to 15 are the first 48, which three words of 16 + 16 bits bring side by side with the rest.
template <>
struct CodeGroup<3> {
    static constexpr int kWords = 3;
    static constexpr int kCodes = 32;
    static constexpr int kClasses = 3;
    static constexpr int kShift[kClasses] = {0, 3, 6};
    static constexpr int kClass[kCodes / 4] = {0, 0, 0, 1, 1, 1, 2, 2};
    static constexpr int kOrder[kCodes / 2] = {0, 3, 6, 9, 11, 14, 1, 4, 7, 10, 12, 15, 2, 5, 8, 13};
    static __device__ __forceinline__ void decode(const unsigned* words, unsigned (&pair)[kCodes / 2]) {
        const unsigned first = __byte_perm(words[0], words[1], 0x7610);   // bits 0 to 15 of both: codes 0 to 4
        const unsigned second = __byte_perm(words[0], words[2], 0x5432);  // bits 16 to 31: codes 6 to 9
        const unsigned third = __byte_perm(words[1], words[2], 0x7610);   // bits 32 to 47: codes 11 to 15
        const unsigned first9 = first >> 9, second2 = second >> 2, second11 = second >> 11;
        const unsigned third1 = third >> 1, third10 = third >> 10;
        pair[0] = first & 0x00070007u;
        pair[1] = first9 & 0x00070007u;
        pair[2] = second2 & 0x00070007u;
        pair[3] = second11 & 0x00070007u;
        pair[4] = third1 & 0x00070007u;
        pair[5] = third10 & 0x00070007u;
        pair[6] = first & 0x00380038u;
        pair[7] = first9 & 0x00380038u;
        pair[8] = second2 & 0x00380038u;
        pair[9] = (second11 & 0x00180018u) | (third << 5 & 0x00200020u);
        pair[10] = third1 & 0x00380038u;
        pair[11] = third10 & 0x00380038u;
        pair[12] = first & 0x01c001c0u;
        pair[13] = (first9 & 0x00400040u) | (second << 7 & 0x01800180u);
        pair[14] = second2 & 0x01c001c0u;
        pair[15] = third1 & 0x01c001c0u;
    }
};

// A pair of codes at shift s as two halves code - zero point: or-ing 2^10 into the halves gives 1024 + code 2^s, and one
// fused multiply-add the difference, exactly. For activations that aren't finite, whose sum can't be subtracted.
__device__ __forceinline__ unsigned difference(unsigned pair, int s, unsigned zero_points) {
    const unsigned shift = static_cast<unsigned>(s) << 10;
    const unsigned negative = (0xe400u - shift) * kBothHalves + (zero_points << s);
    return fma_halves(pair | 0x6400u * kBothHalves, (0x3c00u - shift) * kBothHalves, negative);
}

}  // namespace qmoe::decode

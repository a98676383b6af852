// Activations into shared memory, in the order and form in which the stream multiplies them.

#pragma once

#include "decode_stream.cuh"

namespace qmoe::decode {

// A power of two, 4^-n, that brings the largest finite magnitude of some floats to 2^13 … 2^15, as far as a float can say
// it; and 2^n, by which sums are multiplied twice: once before and once after the weights' scale, so that nothing
// overflows or underflows on the way that wouldn't in the end.
struct Exponent {
    float scale;
    float root;
};

__device__ __forceinline__ Exponent exponent_for(float magnitude) {
    const unsigned field = min(max(__float_as_uint(magnitude) >> 23, 14u), 254u) | 1u;
    return Exponent{__uint_as_float((268u - field) << 23), __uint_as_float((127u + field / 2u - 70u) << 23)};
}

__device__ __forceinline__ float half_of(unsigned halves, int index) {
    return to_float(Float16{static_cast<unsigned short>(index ? halves >> 16 : halves & 0xffffu)});
}

// Where code `code` of a group lies among the halves of a piece.
template <class F>
__device__ constexpr int place_of(int code) {
    constexpr int kHalf = F::Group::kCodes / 2;
    int pair = 0;
    for (int i = 0; i < kHalf; ++i) {
        pair = F::Group::kOrder[i] == code % kHalf ? i : pair;
    }
    return 2 * pair + code / kHalf;
}

// Store eight consecutive values as halves: values `index` * 8 on of a row of pieces, of which every 16 bytes lie
// `Stride` apart.
template <class F, int Stride>
__device__ __forceinline__ void store_halves(unsigned char* pieces, int index, const unsigned short (&halves)[8]) {
    constexpr int kCodes = F::Group::kCodes;
    if constexpr (kCodes <= 8) {
        unsigned words[4] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int place = i / kCodes * kCodes + place_of<F>(i % kCodes);
            words[place / 2] = place % 2 ? words[place / 2] | static_cast<unsigned>(halves[i]) << 16
                                         : (words[place / 2] & 0xffff0000u) | halves[i];
        }
        *reinterpret_cast<uint4*>(pieces + index * Stride) = uint4{words[0], words[1], words[2], words[3]};
    } else {
        constexpr int kEighths = kCodes / 8;
        const int group = index / kEighths, eighth = index % kEighths;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int place = place_of<F>(i);
#pragma unroll
            for (int j = 1; j < kEighths; ++j) {
                place = eighth == j ? place_of<F>(8 * j + i) : place;
            }
            const int vector = group * kEighths + place / 8;
            *reinterpret_cast<unsigned short*>(pieces + vector * Stride + place % 8 * 2) = halves[i];
        }
    }
}

// Sum over the lanes that share a fold of a row, of which each brings eight values; all lanes of a warp take part.
template <int Lanes>
__device__ __forceinline__ float sum_lanes(float value) {
#pragma unroll
    for (int offset = 1; offset < Lanes; offset *= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
}

// Store one eight of a row of pieces, split or not; all lanes of a warp take part, with consecutive eights. Returns
// whether a value that shares its fold is not finite.
template <class F, bool Split>
__device__ __forceinline__ bool store_eight(const float (&values)[8], unsigned char* pieces, unsigned char* factors, int index,
                                            bool present) {
    constexpr int kLanes = F::kFold / 8;  // that share a fold
    float sum = 0.0f;
    unsigned short upper[8];
    if constexpr (!Split) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            upper[i] = from_float<Float16>(values[i]).bits;
            sum += values[i];
        }
        sum = sum_lanes<kLanes>(sum);
        if (present) {
            store_halves<F, 16>(pieces, index, upper);
            if (index % kLanes == 0) {
                reinterpret_cast<float*>(factors)[index / kLanes] = sum * kCodeScale;
            }
        }
        return !(fabsf(sum) < kInfinity);
    } else {
        float magnitude = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            magnitude = fmaxf(magnitude, fabsf(values[i]));
        }
#pragma unroll
        for (int offset = 1; offset < greater(kLanes, 4); offset *= 2) {
            magnitude = fmaxf(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, offset));
        }
        const Exponent exponent = exponent_for(magnitude);
        unsigned short lower[8];
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float first = values[i] * exponent.scale, second = values[i + 1] * exponent.scale;
            sum += first, sum += second;
            const unsigned halves = round_to_halves(first, second);
            const unsigned rest = round_to_halves(first - half_of(halves, 0), second - half_of(halves, 1));
            upper[i] = halves & 0xffffu, upper[i + 1] = halves >> 16;
            lower[i] = rest & 0xffffu, lower[i + 1] = rest >> 16;
        }
        sum = sum_lanes<kLanes>(sum);
        const bool finite = fabsf(sum) < kInfinity;
        if (!finite) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                lower[i] = (upper[i] & 0x7c00u) == 0x7c00u ? 0 : lower[i];
            }
        }
        if (present) {
            store_halves<F, 32>(pieces, index, upper);
            store_halves<F, 32>(pieces + 16, index, lower);
            if (index % kLanes == 0) {
                float* factor = reinterpret_cast<float*>(factors) + index / kLanes * 2;
                factor[0] = sum * kCodeScale, factor[1] = exponent.root;
            }
        }
        return !finite;
    }
}

// Load eight `index` of a row of Size values: zeros from value Size on.
template <int LoadBytes, int Size, class T>
__device__ __forceinline__ void load_eight(const T* row, int index, float (&values)[8]) {
    const int left = Size - 8 * index;
    if (left >= 8) {
        load_values<8, LoadBytes>(row + 8 * index, values);
    } else {
        load_values_guarded<8>(row + 8 * index, Size % 8 ? left : 0, values);
    }
}

// Stage eights `from` to `from` + `count` - 1, by one warp, of floats that the kernel before wrote. `pieces` and `factors` are those of eight 0. Returns whether a value that this lane saw is not finite.
template <class F>
__device__ __forceinline__ bool stage_fresh(const float* values, int from, int count, unsigned char* pieces,
                                            unsigned char* factors, int lane) {
    constexpr int kBatch = 2;
    bool wild = false;
#pragma unroll 1
    for (int base = 0; base < count; base += kBatch * 32) {
        float batch[kBatch][8] = {};
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int place = base + i * 32 + lane;
            if (place < count) {
                const float* source = values + 8ll * (from + place);
                const float4 low = load_fresh(source), high = load_fresh(source + 4);
                batch[i][0] = low.x, batch[i][1] = low.y, batch[i][2] = low.z, batch[i][3] = low.w;
                batch[i][4] = high.x, batch[i][5] = high.y, batch[i][6] = high.z, batch[i][7] = high.w;
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int place = base + i * 32 + lane;
            if (base + i * 32 < count) {
                wild |= store_eight<F, true>(batch[i], pieces, factors, from + place, place < count);
            }
        }
    }
    return wild;
}

}  // namespace qmoe::decode

// Weights as tensor-core fragments: 32 codes of a row per lane and step, decoded to pairs of halves in registers.
//
// A step is 128 inner elements. Lane c of a quad reads codes 32c .. 32c + 31 of its rows, one contiguous piece of
// `bits` words, and so usually one quantization block. The inner index is permuted to suit: position
// 32w + 16t + 8h + 2c + e of a step is inner element 32c + 8w + 4e + 2t + h. The tokens in shared memory are stored by
// position, so both operands agree. A pair (e = 0, 1) is two codes four apart, which one mask takes from a word.
//
// A code q becomes the half 2^m + q by its bits alone (m mantissa bits), and q - zero point by one exact subtraction
// or multiply-add. With blocks it is then multiplied by the scale, which rounds once; row-wise scales are applied to
// the float result instead.

#pragma once

#include "quantization.cuh"

namespace qmoe::prefill {

constexpr int kStepInner = 128;
constexpr int kLaneCodes = 32;

// The inner element of a step that is stored at a position.
__device__ __forceinline__ constexpr int inner_of_position(int position) {
    const int w = position >> 5, t = position >> 4 & 1, h = position >> 3 & 1, c = position >> 1 & 3, e = position & 1;
    return 32 * c + 8 * w + 4 * e + 2 * t + h;
}

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

// Bytes between two rows of a matrix.
struct RowsApart {
    long long codes;
    long long scales;
    long long zero_points;
};

// The pair of weight rows of one lane: where the lower row lies, and how many bytes further the upper one does, which
// is the same for all lanes and so costs them no registers.
struct RowPair {
    const unsigned char* codes;
    const unsigned char* scales;
    const unsigned char* zero_points;
    RowsApart apart;
    unsigned row_zero_points[2];  // row-wise formats
};

// The pair that begins with row `lower` of a matrix; `further` has the upper row, and is the same matrix or another of
// this format. `apart` is the number of rows between the two, given also in bytes.
template <class F>
__device__ __forceinline__ RowPair row_pair(const Matrix& matrix, const Matrix& further, long long expert, int row,
                                            int apart, const RowsApart& bytes) {
    const MatrixRow lower = matrix_row<F>(matrix, expert, row);
    RowPair rows;
    rows.codes = lower.codes;
    rows.scales = static_cast<const unsigned char*>(lower.scales);
    rows.zero_points = lower.zero_points;
    rows.apart.codes = further.weights - matrix.weights + bytes.codes;
    rows.apart.scales = static_cast<const char*>(further.scales) - static_cast<const char*>(matrix.scales) + bytes.scales;
    rows.apart.zero_points = further.zero_points - matrix.zero_points + bytes.zero_points;
    if constexpr (F::kBlockSize == 0 && F::kZeroPoints) {
        const MatrixRow upper = matrix_row<F>(further, expert, row + apart);
        rows.row_zero_points[0] = __float_as_uint(lower.shifted_zero) & 0xffu;
        rows.row_zero_points[1] = __float_as_uint(upper.shifted_zero) & 0xffu;
    }
    return rows;
}

// The scale of a row-wise format's row, which the float result is multiplied by; 1 where blocks have scales.
template <class F>
__device__ __forceinline__ float row_scale(const Matrix& matrix, long long expert, int row) {
    if constexpr (F::kBlockSize == 0) {
        return load_scale(static_cast<const typename F::Scale*>(matrix.scales), expert * matrix.out_features + row);
    } else {
        return 1.0f;
    }
}

// A format and the width of its code loads, at most 32 codes.
template <class F, int LoadBytes>
struct Weights {
    using Format = F;
    static constexpr int kLoadBytes = LoadBytes;
    static constexpr int kScales = F::kBlockSize == 16 ? 2 : 1;  // per lane and step
    static constexpr bool kBlocks = F::kBlockSize != 0;
    static_assert(4 * F::kBits % LoadBytes == 0, "a lane's codes are a whole number of loads");
};

// What a lane reads of one row for one step.
template <class W>
struct StepCodes {
    unsigned words[W::Format::kBits];
    typename W::Format::Scale scales[W::kScales];
    unsigned char zero_points[W::kScales];
};

template <int Bytes>
__device__ __forceinline__ void load_words(const unsigned char* source, unsigned* words, int index) {
    if constexpr (Bytes == 16) {
        unsigned* to = words + 4 * index;
        asm("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
            : "l"(source));
    } else if constexpr (Bytes == 8) {
        unsigned* to = words + 2 * index;
        asm("ld.global.nc.L2::256B.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(source));
    } else if constexpr (Bytes == 4) {
        words[index] = __ldg(reinterpret_cast<const unsigned*>(source));
    } else if constexpr (Bytes == 2) {
        const unsigned part = __ldg(reinterpret_cast<const unsigned short*>(source));
        words[index / 2] = index % 2 ? words[index / 2] | part << 16 : part;
    } else {
        const unsigned part = __ldg(source);
        words[index / 4] = index % 4 ? words[index / 4] | part << (8 * (index % 4)) : part;
    }
}

__device__ __forceinline__ void clear(float& value) { value = 0.0f; }
template <class T>
__device__ __forceinline__ void clear(T& value) {
    value.bits = 0;
}
__device__ __forceinline__ float load_raw(const float* source) { return __ldg(source); }
template <class T>
__device__ __forceinline__ T load_raw(const T* source) {
    return T{__ldg(&source->bits)};
}

// Read a lane's codes at inner element `inner`, a multiple of 32, of the lower or upper row. Past the row's end, a
// multiple of 16, codes and scales are zero.
template <class W, bool upper>
__device__ __forceinline__ void load_step(const RowPair& rows, int inner, int in_features, StepCodes<W>& codes) {
    using F = typename W::Format;
    const int bytes = min(max(in_features - inner, 0), kLaneCodes) / 8 * F::kBits;
    const unsigned char* source =
        rows.codes + (upper ? rows.apart.codes : 0) + static_cast<unsigned>(inner) / 8 * F::kBits;
#pragma unroll
    for (int i = 0; i < 4 * F::kBits / W::kLoadBytes; ++i) {
        if (i * W::kLoadBytes < bytes) {
            load_words<W::kLoadBytes>(source + i * W::kLoadBytes, codes.words, i);
        } else {
            constexpr int kWords = W::kLoadBytes < 4 ? 1 : W::kLoadBytes / 4;
#pragma unroll
            for (int j = 0; j < kWords; ++j) {
                if (i * W::kLoadBytes % 4 == 0) {
                    codes.words[i * W::kLoadBytes / 4 + j] = 0;
                }
            }
        }
    }
    if constexpr (W::kBlocks) {
#pragma unroll
        for (int i = 0; i < W::kScales; ++i) {
            clear(codes.scales[i]);
            codes.zero_points[i] = 0;
            if (inner + 16 * i < in_features) {
                const unsigned block = static_cast<unsigned>(inner + 16 * i) / (F::kBlockSize ? F::kBlockSize : 1);
                const unsigned char* scales = rows.scales + (upper ? rows.apart.scales : 0);
                codes.scales[i] = load_raw(reinterpret_cast<const typename F::Scale*>(scales) + block);
                if constexpr (F::kZeroPoints) {
                    const unsigned char* points = rows.zero_points + (upper ? rows.apart.zero_points : 0);
                    codes.zero_points[i] = static_cast<unsigned char>(read_code<F::kBits>(points, block));
                }
            }
        }
    }
}

// Scales rounded to half keep their precision and the products with codes their range, or this says so. In bf16 the
// range is that of float.
template <class Half, int Bits>
__device__ __forceinline__ bool scale_fits(float scale) {
    if constexpr (kSameType<Half, Float16>) {
        constexpr float kLargest = 65504.0f / ((1 << Bits) - 1);
        const float size = fabsf(scale);
        return size == 0.0f || (size >= 6.103515625e-5f && size <= kLargest);
    } else {
        return true;
    }
}
template <class Half, int Bits>
__device__ __forceinline__ bool scale_fits(Float16 scale) {
    if constexpr (kSameType<Half, Float16>) {
        constexpr float kLargest = 65504.0f / ((1 << Bits) - 1);
        return fabsf(to_float(scale)) <= kLargest;  // products with small scales are exact or round as any
    } else {
        return true;
    }
}
template <class Half, int Bits>
__device__ __forceinline__ bool scale_fits(BFloat16 scale) {
    return scale_fits<Half, Bits>(to_float(scale));
}

template <class W, class Half>
__device__ __forceinline__ bool scales_fit(const StepCodes<W>& codes) {
    bool fit = true;
    if constexpr (W::kBlocks) {
#pragma unroll
        for (int i = 0; i < W::kScales; ++i) {
            fit &= scale_fits<Half, W::Format::kBits>(codes.scales[i]);
        }
    }
    return fit;
}

template <class Half, class Scale>
__device__ __forceinline__ unsigned scale_pair(Scale scale) {
    if constexpr (kSameType<Half, Scale>) {
        return scale.bits * 0x10001u;
    } else {
        return from_float<Half>(to_float(scale)).bits * 0x10001u;
    }
}

// Of the pair `index` (0 .. 3, bits * index up) in a word of two 16-bit halves: how far to shift the word right, so
// that the code lands within the mantissa. Pairs that fit where they are, or beside another shifted one, share shifts.
template <int Bits, int Mantissa>
__device__ __forceinline__ constexpr int pair_shift(int index) {
    int shift = 0;
    for (int i = 0; i <= index; ++i) {
        if (Bits * i - shift + Bits > Mantissa) {
            shift = Bits * i;
        }
    }
    return shift;
}

// One row's share of a step, ready to be decoded.
template <class W, class Half>
struct Decoder {
    using F = typename W::Format;
    using Math = PairMath<Half>;
    static constexpr bool kWide = F::kBits == 8 && kSameType<Half, BFloat16>;  // codes exceed the mantissa
    unsigned scales[W::kScales];
    float wide_scales[W::kScales];
    unsigned zero_points[W::kScales];

    __device__ __forceinline__ Decoder(const StepCodes<W>& codes, unsigned row_zero_point) {
#pragma unroll
        for (int i = 0; i < W::kScales; ++i) {
            scales[i] = 0;
            wide_scales[i] = 1.0f;
            if constexpr (W::kBlocks) {
                if constexpr (kWide) {
                    wide_scales[i] = to_float(codes.scales[i]);
                } else {
                    scales[i] = scale_pair<Half>(codes.scales[i]);
                }
            }
            zero_points[i] = 1u << (F::kBits - 1);
            if constexpr (F::kZeroPoints) {
                zero_points[i] = W::kBlocks ? codes.zero_points[i] : row_zero_point;
            }
        }
    }

    // Two 16-bit halves, the lower with codes 8w + j at bit bits * j, the upper with codes 8w + 4 + j.
    __device__ static __forceinline__ unsigned spread(const unsigned* words, int w) {
        if constexpr (F::kBits == 4) {
            return words[w];
        } else if constexpr (F::kBits == 2) {
            return __byte_perm(words[w / 2], 0, w % 2 ? 0x4342 : 0x4140);
        } else if constexpr (F::kBits == 1) {
            const unsigned byte = __byte_perm(words[0], 0, 0x4440 + w);
            return (byte | byte << 12) & 0x000f000fu;
        } else {
            const int bit = 24 * w;
            const unsigned field =
                bit % 32 == 0 ? words[bit / 32]
                              : bit % 32 + 24 <= 32 ? words[bit / 32] >> bit % 32
                                                    : __funnelshift_r(words[bit / 32], words[bit / 32 + 1], bit % 32);
            return (field & 0xfffu) | (field & 0xfff000u) << 4;
        }
    }

    // Pair `index` = 2t + h of word w: the values of codes 8w + index and 8w + 4 + index.
    template <int w, int index>
    __device__ __forceinline__ unsigned pair(const unsigned* words) const {
        constexpr int block = W::kScales == 2 ? w / 2 : 0;
        if constexpr (kWide) {
            const float zero = shifted_integer(zero_points[block]);
            const float low = shifted_integer(words[2 * w] >> (8 * index) & 0xffu) - zero;
            const float high = shifted_integer(words[2 * w + 1] >> (8 * index) & 0xffu) - zero;
            return Math::pack(low * wide_scales[block], high * wide_scales[block]);
        } else {
            constexpr unsigned kUnits = 0x10001u;
            constexpr unsigned kMagic = (Math::kBias + Math::kMantissa) << Math::kMantissa;
            constexpr int shift = F::kBits == 8 ? 8 * index : pair_shift<F::kBits, Math::kMantissa>(index);
            constexpr int up = F::kBits * index - shift;  // where the code lies within the mantissa
            constexpr unsigned kMask = ((1u << F::kBits) - 1u) << up;
            unsigned bits;
            if constexpr (F::kBits == 8) {
                bits = __byte_perm(words[2 * w], words[2 * w + 1], 0x0400 + 0x0101 * index);
                bits = (bits & 0x00ff00ffu) | kMagic * kUnits;
            } else {
                bits = (spread(words, w) >> shift & kMask * kUnits) | kMagic * kUnits;
            }
            const unsigned offset = (1u << 15 | (Math::kBias + Math::kMantissa - up) << Math::kMantissa) +
                                    (zero_points[block] << up);
            unsigned value;
            if constexpr (up == 0) {
                value = Math::add(bits, offset * kUnits);
            } else {
                value = Math::fma(bits, ((Math::kBias - up) << Math::kMantissa) * kUnits, offset * kUnits);
            }
            return W::kBlocks ? Math::mul(value, scales[block]) : value;
        }
    }
};

}  // namespace qmoe::prefill

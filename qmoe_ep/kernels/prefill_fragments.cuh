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

#include "prefill_pairs.cuh"
#include "prefill_pipeline.cuh"
#include "quantization.cuh"

namespace qmoe::prefill {

constexpr int kStepInner = 128;
constexpr int kLaneCodes = 32;

// The inner element of a step that is stored at a position.
__device__ __forceinline__ constexpr int inner_of_position(int position) {
    const int w = position >> 5, t = position >> 4 & 1, h = position >> 3 & 1, c = position >> 1 & 3, e = position & 1;
    return 32 * c + 8 * w + 4 * e + 2 * t + h;
}

// Bytes between two rows of a matrix.
struct RowsApart {
    long long codes;
    long long scales;
    long long zero_points;
};

// Bytes from a lane's first row to its others: from the lower to the upper row of a band, from band to band; and to the
// rows of the lane that is fed with it.
struct LaneRowsApart {
    RowsApart upper;
    RowsApart band;
    RowsApart lane;
};

constexpr int kLaneRows = 4;

// The weight rows of one lane: lower and upper row of its first band, then of its second; then those of another lane. The
// distances are the same for all lanes and so cost them no registers.
struct LaneRows {
    const unsigned char* codes;  // of the first
    const unsigned char* scales;
    const unsigned char* zero_points;
    LaneRowsApart apart;
    unsigned present;          // bit i: there is row i
    unsigned row_zero_points;  // row-wise formats: byte i is that of row i

    __device__ __forceinline__ bool has(int i) const { return present >> i & 1u; }
    __device__ __forceinline__ long long codes_offset(int i) const {
        return (i % 2 ? apart.upper.codes : 0) + (i / 2 % 2 ? apart.band.codes : 0) + (i / 4 ? apart.lane.codes : 0);
    }
    __device__ __forceinline__ long long scales_offset(int i) const {
        return (i % 2 ? apart.upper.scales : 0) + (i / 2 % 2 ? apart.band.scales : 0) + (i / 4 ? apart.lane.scales : 0);
    }
    __device__ __forceinline__ long long zero_points_offset(int i) const {
        return (i % 2 ? apart.upper.zero_points : 0) + (i / 2 % 2 ? apart.band.zero_points : 0) + (i / 4 ? apart.lane.zero_points : 0);
    }
};

// Rows of a lane that begin with row `first` of a matrix; `further` has the upper rows, and is the same matrix or
// another of this format. The others are `upper` and `band` rows away; of those that aren't `present` nothing is read.
template <class F>
__device__ __forceinline__ LaneRows lane_rows(const Matrix& matrix, const Matrix& further, long long expert, int first,
                                              int upper, int band, unsigned present, const LaneRowsApart& apart) {
    const MatrixRow row = matrix_row<F>(matrix, expert, first);
    LaneRows rows;
    rows.codes = row.codes;
    rows.scales = static_cast<const unsigned char*>(row.scales);
    rows.zero_points = row.zero_points;
    rows.apart = apart;
    rows.apart.upper.codes += further.weights - matrix.weights;
    rows.apart.upper.scales += static_cast<const char*>(further.scales) - static_cast<const char*>(matrix.scales);
    rows.apart.upper.zero_points += further.zero_points - matrix.zero_points;
    rows.present = present;
    rows.row_zero_points = 0;
    if constexpr (F::kBlockSize == 0 && F::kZeroPoints) {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            const int at = first + (i % 2 ? upper : 0) + (i / 2 ? band : 0);
            if (rows.has(i)) {
                const MatrixRow own = matrix_row<F>(i % 2 ? further : matrix, expert, at);
                rows.row_zero_points |= (__float_as_uint(own.shifted_zero) & 0xffu) << (8 * i);
            }
        }
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

// A format, the width of its code loads, and what a lane keeps of one step in shared memory: the codes of its four rows,
// in pieces, and their scales as pairs of halves (or floats) with the zero points.
template <class F, int LoadBytes>
struct Weights {
    using Format = F;
    static constexpr int kLoadBytes = LoadBytes;
    static constexpr int kScales = F::kBlockSize == 16 ? 2 : 1;  // per row and step
    static constexpr bool kBlocks = F::kBlockSize != 0;
    static constexpr bool kPoints = kBlocks && F::kZeroPoints;
    static constexpr bool kRowPoints = !kBlocks && F::kZeroPoints;
    static constexpr int kRowBytes = F::kBits == 3 ? 16 : 4 * F::kBits;
    static constexpr int kPieceBytes = kRowBytes < 16 ? kRowBytes : 16;
    static constexpr int kPieces = kRowBytes / kPieceBytes;
    static constexpr int kLaneBytes =
        kLaneRows * kRowBytes + (kBlocks ? 16 * kScales : 0) + (kPoints ? 4 * kScales : 0);
    static_assert(4 * F::kBits % LoadBytes == 0, "a lane's codes are a whole number of loads");
};

// Words that hold the codes of one panel, half a step of a row: 16 codes, of 1 bit or 3 bits with some of the others.
template <int Bits>
constexpr int kPanelWords = Bits == 1 ? 1 : (Bits + 1) / 2;

// What is read ahead of one step into registers, on its way to shared memory.
template <class W>
struct PendingScales {
    typename W::Format::Scale scales[kLaneRows][W::kScales];
    unsigned char zero_points[kLaneRows][W::kScales];
};

__device__ __forceinline__ void clear(float& value) { value = 0.0f; }
template <class T>
__device__ __forceinline__ void clear(T& value) {
    value.bits = 0;
}
__device__ __forceinline__ float load_raw(const float* source) { return load_streamed(source); }
template <class T>
__device__ __forceinline__ T load_raw(const T* source) {
    return T{load_streamed(&source->bits)};
}

// Copy a lane's codes of one row to shared memory at `to`, whose pieces are `piece_stride` bytes apart: `bytes` of
// them, zeros after. Narrow loads, of rows that are aligned to less than 4 bytes, go through registers.
template <class W>
__device__ __forceinline__ void copy_codes(unsigned to, unsigned piece_stride, const unsigned char* source, int bytes) {
    constexpr int kBytes = 4 * W::Format::kBits;
    if constexpr (W::kLoadBytes >= 4) {
#pragma unroll
        for (int i = 0; i < kBytes / W::kLoadBytes; ++i) {
            const int at = i * W::kLoadBytes;
            copy_async<W::kLoadBytes>(to + at / W::kPieceBytes * piece_stride + at % W::kPieceBytes, source + at,
                                      at < bytes ? W::kLoadBytes : 0);
        }
    } else {
#pragma unroll
        for (int word = 0; word < kBytes / 4; ++word) {
            unsigned value = 0;
#pragma unroll
            for (int i = 0; i < 4; i += W::kLoadBytes) {
                if (4 * word + i < bytes) {
                    const unsigned char* from = source + 4 * word + i;
                    const unsigned part = W::kLoadBytes == 2 ? __ldg(reinterpret_cast<const unsigned short*>(from))
                                                             : __ldg(from);
                    value |= part << (8 * i);
                }
            }
            store_shared(to + 4 * word / W::kPieceBytes * piece_stride + 4 * word % W::kPieceBytes, value);
        }
    }
}

// Read the scales and zero points of a lane's rows, or the other's, at inner element `inner`, a multiple of 32; zero past
// the end.
template <class W, int which_lane>
__device__ __forceinline__ void load_scales(const LaneRows& rows, int inner, int in_features,
                                            PendingScales<W>& pending) {
    using F = typename W::Format;
    if constexpr (W::kBlocks) {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            const int row = kLaneRows * which_lane + i;
#pragma unroll
            for (int which = 0; which < W::kScales; ++which) {
                clear(pending.scales[i][which]);
                pending.zero_points[i][which] = 0;
                const unsigned own = inner + 16 * which;
                if (static_cast<int>(own) < in_features && rows.has(row)) {
                    const unsigned block = own / (F::kBlockSize ? F::kBlockSize : 1);
                    const unsigned char* scales = rows.scales + rows.scales_offset(row);
                    pending.scales[i][which] =
                        load_raw(reinterpret_cast<const typename F::Scale*>(scales) + block);
                    if constexpr (F::kZeroPoints) {
                        pending.zero_points[i][which] = static_cast<unsigned char>(
                            read_code<F::kBits>(rows.zero_points + rows.zero_points_offset(row), block));
                    }
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

// The same for all that is on its way.
template <class W, class Half>
__device__ __forceinline__ bool scales_fit(const PendingScales<W>& pending) {
    bool fit = true;
    if constexpr (W::kBlocks) {
#pragma unroll
        for (int i = 0; i < kLaneRows * W::kScales; ++i) {
            fit &= scale_fits<Half, W::Format::kBits>(pending.scales[i % kLaneRows][i / kLaneRows]);
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

// Whether codes exceed the mantissa of Half, so that they are decoded as floats.
template <class W, class Half>
constexpr bool kWideCodes = W::Format::kBits == 8 && kSameType<Half, BFloat16>;

// A scale as it is kept in shared memory.
template <class W, class Half, class Scale>
__device__ __forceinline__ unsigned stored_scale(Scale scale) {
    if constexpr (kWideCodes<W, Half>) {
        return __float_as_uint(to_float(scale));
    } else {
        return scale_pair<Half>(scale);
    }
}

// Decodes one row's share of a panel, which has one scale.
template <class W, class Half>
struct Decoder {
    using F = typename W::Format;
    using Math = PairMath<Half>;
    unsigned scale;
    unsigned zero_point;

    // Two 16-bit halves, the lower with codes 8w + j at bit bits * j, the upper with codes 8w + 4 + j. `words` begins
    // with the word that holds the first code of the panel, see kPanelWords.
    __device__ static __forceinline__ unsigned spread(const unsigned* words, int w) {
        if constexpr (F::kBits == 4) {
            return words[w % 2];
        } else if constexpr (F::kBits == 2) {
            return __byte_perm(words[0], 0, w % 2 ? 0x4342 : 0x4140);
        } else if constexpr (F::kBits == 1) {
            const unsigned byte = __byte_perm(words[0], 0, 0x4440 + w);
            return (byte | byte << 12) & 0x000f000fu;
        } else {
            const int bit = 24 * w - 32 * (w / 2);
            const unsigned field = bit % 32 + 24 <= 32 ? words[bit / 32] >> bit % 32
                                                       : __funnelshift_r(words[0], words[1], bit % 32);
            return (field & 0xfffu) | (field & 0xfff000u) << 4;
        }
    }

    // Pair `index` = 2t + h of word w: the values of codes 8w + index and 8w + 4 + index. `words` as for spread.
    template <int w, int index>
    __device__ __forceinline__ unsigned pair(const unsigned* words) const {
        if constexpr (kWideCodes<W, Half>) {
            const float zero = shifted_integer(zero_point);
            const float low = shifted_integer(words[w % 2 * 2] >> (8 * index) & 0xffu) - zero;
            const float high = shifted_integer(words[w % 2 * 2 + 1] >> (8 * index) & 0xffu) - zero;
            if constexpr (!W::kBlocks) {
                return Math::pack(low, high);
            } else {
                const float factor = __uint_as_float(scale);
                return Math::pack(low * factor, high * factor);
            }
        } else {
            constexpr unsigned kUnits = 0x10001u;
            constexpr unsigned kMagic = (Math::kBias + Math::kMantissa) << Math::kMantissa;
            constexpr int shift = F::kBits == 8 ? 8 * index : pair_shift<F::kBits, Math::kMantissa>(index);
            constexpr int up = F::kBits * index - shift;  // where the code lies within the mantissa
            constexpr unsigned kMask = ((1u << F::kBits) - 1u) << up;
            unsigned bits;
            if constexpr (F::kBits == 8) {
                bits = __byte_perm(words[w % 2 * 2], words[w % 2 * 2 + 1], 0x0400 + 0x0101 * index);
                bits = (bits & 0x00ff00ffu) | kMagic * kUnits;
            } else {
                bits = (spread(words, w) >> shift & kMask * kUnits) | kMagic * kUnits;
            }
            const unsigned offset = (1u << 15 | (Math::kBias + Math::kMantissa - up) << Math::kMantissa) +
                                    (zero_point << up);
            unsigned value;
            if constexpr (up == 0) {
                value = Math::add(bits, offset * kUnits);
            } else {
                value = Math::fma(bits, ((Math::kBias - up) << Math::kMantissa) * kUnits, offset * kUnits);
            }
            return W::kBlocks ? Math::mul(value, scale) : value;
        }
    }
};

}  // namespace qmoe::prefill

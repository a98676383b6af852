// Weight formats on the device: addresses, loads and the one decode rule of each.
//
// A row of codes is a bit stream, least-significant bits first, padded to a byte. It is read in chunks of 16 codes,
// which is the smallest block: a chunk has one scale and one zero point, and 2 * bits whole bytes. A value is
// element * scale in float, rounded once. The element of an integer is code - zero point, which is exact for packed zero
// points; that of a small float is its value. A scale per expert is multiplied into those of the blocks.

#pragma once

#include "float_types.cuh"

namespace qmoe {

constexpr int kChunkCodes = 16;

// What a code spells.
enum class Element { kInteger, kE2m1, kE4m3 };

// Format of one quantized matrix. BlockSize 0 is row-wise; Scale void is none but the global one; Bias void is no bias;
// LoadBytes is the width of a code load, at most what every row's address is aligned to. Zero is the type of zero
// points, void if they are packed codes. BlockRows rows share their scales; the last block of a row may then be cut.
template <int Bits, int BlockSize, bool ZeroPoints, class ScaleType, class BiasType, int LoadBytes,
          Element element = Element::kInteger, class ZeroType = void, bool GlobalScale = false, int BlockRows = 1>
struct Format {
    static constexpr int kBits = Bits;
    static constexpr int kBlockSize = BlockSize;
    static constexpr bool kZeroPoints = ZeroPoints;
    static constexpr Element kElement = element;
    static constexpr bool kGlobalScale = GlobalScale;
    static constexpr int kBlockRows = BlockRows;
    static constexpr bool kWhole = BlockSize != 0 && BlockRows == 1;  // rows are whole chunks
    using Zero = ZeroType;
    static constexpr int kChunkBytes = 2 * Bits;
    static constexpr int kLoadBytes = LoadBytes;
    using Scale = ScaleType;
    using Bias = BiasType;
    static_assert(kChunkBytes % LoadBytes == 0, "a chunk is a whole number of loads");
    static_assert(BlockSize == 0 || BlockSize % kChunkCodes == 0, "a chunk lies in one block");
};

// Operands of one matrix over all experts: codes [E, out, row bytes], scales [E, out, blocks], bias [E, out],
// zero points [E, out, bytes] or, row-wise, [E, bytes].
struct Matrix {
    const unsigned char* weights;
    const void* scales;
    const void* bias;
    const unsigned char* zero_points;
    int out_features;
    int in_features;
    const float* global_scales = nullptr;  // [E]
};

// One row of one expert's matrix. Row-wise formats hold their scale and zero point here; with blocks, scale is the
// global one.
struct MatrixRow {
    const unsigned char* codes;
    const void* scales;
    const unsigned char* zero_points;
    float scale;
    float shifted_zero;
};

// Sixteen codes with their scale and 2^23 + zero point, or the zero point itself where it is a float.
template <int Bits>
struct Chunk {
    static constexpr int kWords = (Bits + 1) / 2;
    unsigned words[kWords];
    float scale;
    float shifted_zero;
};

constexpr unsigned kFloatIntegerBits = 0x4b000000;  // 2^23: or-ed with an integer below 2^23 it is the float 2^23 + integer

__device__ __forceinline__ float shifted_integer(unsigned value) { return __uint_as_float(kFloatIntegerBits | value); }

template <int Bits>
__device__ __forceinline__ long long packed_bytes(long long count) {
    return (count * Bits + 7) >> 3;
}

// Code `index` of a packed stream; reads only bytes that hold bits of it.
template <int Bits>
__device__ __forceinline__ unsigned read_code(const unsigned char* bytes, long long index) {
    const long long bit = index * Bits;
    const int shift = static_cast<int>(bit & 7);
    unsigned value = __ldg(bytes + (bit >> 3));
    if constexpr (8 % Bits != 0) {
        if (shift + Bits > 8) {
            value |= static_cast<unsigned>(__ldg(bytes + (bit >> 3) + 1)) << 8;
        }
    }
    return (value >> shift) & ((1u << Bits) - 1u);
}

__device__ __forceinline__ float load_scale(const float* scales, long long index) { return __ldg(scales + index); }

template <class T>
__device__ __forceinline__ float load_scale(const T* scales, long long index) {
    return to_float(T{__ldg(&scales[index].bits)});
}

template <class F>
__device__ __forceinline__ int row_blocks(int in_features) {
    return F::kBlockSize ? (in_features + F::kBlockSize - 1) / (F::kBlockSize ? F::kBlockSize : 1) : 1;
}

template <class F>
__device__ __forceinline__ float load_zero(const void* zero_points, long long index) {
    return load_scale(static_cast<const typename F::Zero*>(zero_points), index);
}

template <class F>
__device__ __forceinline__ MatrixRow matrix_row(const Matrix& matrix, long long expert, int row) {
    const long long index = expert * matrix.out_features + row;
    const int blocks = row_blocks<F>(matrix.in_features);
    MatrixRow result;
    result.codes = matrix.weights + index * packed_bytes<F::kBits>(matrix.in_features);
    result.scales = nullptr;
    result.zero_points = nullptr;
    result.scale = F::kGlobalScale ? __ldg(matrix.global_scales + expert) : 1.0f;
    result.shifted_zero = shifted_integer(1u << (F::kBits - 1));
    if constexpr (!kIsVoid<typename F::Scale>) {
        const int bands = (matrix.out_features + F::kBlockRows - 1) / F::kBlockRows;
        const long long band = F::kBlockRows == 1 ? index : expert * bands + row / F::kBlockRows;
        result.scales = static_cast<const typename F::Scale*>(matrix.scales) + band * blocks;
    }
    if constexpr (F::kZeroPoints && !kIsVoid<typename F::Zero>) {
        const auto* own = reinterpret_cast<const typename F::Zero*>(matrix.zero_points) + index * blocks;
        result.zero_points = reinterpret_cast<const unsigned char*>(own);
    }
    if constexpr (F::kBlockSize == 0) {
        if constexpr (!kIsVoid<typename F::Scale>) {
            result.scale *= load_scale(static_cast<const typename F::Scale*>(result.scales), 0);
        }
        if constexpr (!F::kZeroPoints) {
        } else if constexpr (!kIsVoid<typename F::Zero>) {
            result.shifted_zero = load_zero<F>(result.zero_points, 0);
        } else {
            const unsigned char* own = matrix.zero_points + expert * packed_bytes<F::kBits>(matrix.out_features);
            result.shifted_zero = shifted_integer(read_code<F::kBits>(own, row));
        }
    } else if constexpr (F::kZeroPoints && kIsVoid<typename F::Zero>) {
        result.zero_points = matrix.zero_points + index * packed_bytes<F::kBits>(blocks);
    }
    return result;
}

template <class F>
__device__ __forceinline__ float load_bias(const Matrix& matrix, long long expert, int row) {
    if constexpr (kIsVoid<typename F::Bias>) {
        return 0.0f;
    } else {
        return load_scale(static_cast<const typename F::Bias*>(matrix.bias), expert * matrix.out_features + row);
    }
}

// The bytes of a whole chunk in loads of F::kLoadBytes.
template <class F>
__device__ __forceinline__ void load_codes(const unsigned char* source, Chunk<F::kBits>& chunk) {
    constexpr int kLoads = F::kChunkBytes / F::kLoadBytes;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        if constexpr (F::kLoadBytes == 16) {
            const uint4 wide = __ldg(reinterpret_cast<const uint4*>(source));
            chunk.words[0] = wide.x, chunk.words[1] = wide.y, chunk.words[2] = wide.z, chunk.words[3] = wide.w;
        } else if constexpr (F::kLoadBytes == 8) {
            const uint2 wide = __ldg(reinterpret_cast<const uint2*>(source) + i);
            chunk.words[2 * i] = wide.x, chunk.words[2 * i + 1] = wide.y;
        } else if constexpr (F::kLoadBytes == 4) {
            chunk.words[i] = __ldg(reinterpret_cast<const unsigned*>(source) + i);
        } else if constexpr (F::kLoadBytes == 2) {
            const unsigned part = __ldg(reinterpret_cast<const unsigned short*>(source) + i);
            chunk.words[i / 2] = i % 2 ? chunk.words[i / 2] | part << 16 : part;
        } else {
            const unsigned part = __ldg(source + i);
            chunk.words[i / 4] = i % 4 ? chunk.words[i / 4] | part << (8 * (i % 4)) : part;
        }
    }
}

// Chunk `index` of a row of `in_features` codes. Bits beyond the row's end are zero.
template <class F>
__device__ __forceinline__ Chunk<F::kBits> load_chunk(const MatrixRow& row, int index, int in_features) {
    Chunk<F::kBits> chunk;
    const long long first = static_cast<long long>(index) * F::kChunkBytes;
    if (F::kWhole || (index + 1) * static_cast<long long>(kChunkCodes) <= in_features) {
        load_codes<F>(row.codes + first, chunk);
    } else {
        const int present = static_cast<int>(packed_bytes<F::kBits>(in_features) - first);
#pragma unroll
        for (int i = 0; i < F::kChunkBytes; ++i) {
            const unsigned part = i < present ? __ldg(row.codes + first + i) : 0u;
            chunk.words[i / 4] = i % 4 ? chunk.words[i / 4] | part << (8 * (i % 4)) : part;
        }
    }
    chunk.scale = row.scale;
    chunk.shifted_zero = row.shifted_zero;
    if constexpr (F::kBlockSize != 0) {
        const int block = index / (F::kBlockSize / kChunkCodes);
        chunk.scale = load_scale(static_cast<const typename F::Scale*>(row.scales), block);
        if constexpr (F::kGlobalScale) {
            chunk.scale *= row.scale;
        }
        if constexpr (!F::kZeroPoints) {
        } else if constexpr (!kIsVoid<typename F::Zero>) {
            chunk.shifted_zero = load_zero<F>(row.zero_points, block);
        } else {
            chunk.shifted_zero = shifted_integer(read_code<F::kBits>(row.zero_points, block));
        }
    }
    return chunk;
}

// The decode rule: value j of a chunk.
template <class F>
__device__ __forceinline__ float chunk_value(const Chunk<F::kBits>& chunk, int j) {
    constexpr int kBits = F::kBits;
    const int word = j * kBits / 32;
    const int shift = j * kBits % 32;
    unsigned code = chunk.words[word] >> shift;
    if (shift + kBits > 32) {
        code |= chunk.words[word + 1] << (32 - shift);
    }
    code &= (1u << kBits) - 1u;
    if constexpr (F::kElement == Element::kE2m1) {
        // As for E4M3: the exponent's bias is 1, so the bits of a float are 2^126 too small.
        constexpr float kBias = __builtin_bit_cast(float, (127u + 126u) << 23);
        return __uint_as_float((code & 8u) << 28 | (code & 7u) << 22) * kBias * chunk.scale;
    } else if constexpr (F::kElement == Element::kE4m3) {
        return to_float(E4M3{static_cast<unsigned char>(code)}) * chunk.scale;
    } else if constexpr (F::kZeroPoints && !kIsVoid<typename F::Zero>) {
        return (shifted_integer(code) - shifted_integer(0) - chunk.shifted_zero) * chunk.scale;
    } else {
        return (shifted_integer(code) - chunk.shifted_zero) * chunk.scale;
    }
}

// --- activations ----------------------------------------------------------------------------------------------------

// Count consecutive values of a row of floats or halves, in loads of LoadBytes, to which `source` is aligned.
template <int Count, int LoadBytes, class T>
__device__ __forceinline__ void load_values(const T* source, float (&values)[Count]) {
    constexpr int kPerLoad = LoadBytes / static_cast<int>(sizeof(T));
    static_assert(kPerLoad >= 1 && Count % kPerLoad == 0, "a whole number of loads");
    if constexpr (LoadBytes <= 2 || LoadBytes == sizeof(T)) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            values[i] = to_float(source[i]);
        }
    } else {
        constexpr int kWords = LoadBytes / 4;
#pragma unroll
        for (int i = 0; i < Count / kPerLoad; ++i) {
            unsigned words[kWords];
            if constexpr (kWords == 4) {
                const uint4 wide = reinterpret_cast<const uint4*>(source)[i];
                words[0] = wide.x, words[1] = wide.y, words[2] = wide.z, words[3] = wide.w;
            } else if constexpr (kWords == 2) {
                const uint2 wide = reinterpret_cast<const uint2*>(source)[i];
                words[0] = wide.x, words[1] = wide.y;
            } else {
                words[0] = reinterpret_cast<const unsigned*>(source)[i];
            }
#pragma unroll
            for (int j = 0; j < kPerLoad; ++j) {
                if constexpr (sizeof(T) == 4) {
                    values[i * kPerLoad + j] = __uint_as_float(words[j]);
                } else {
                    const unsigned bits = j % 2 ? words[j / 2] >> 16 : words[j / 2] & 0xffffu;
                    values[i * kPerLoad + j] = to_float(T{static_cast<unsigned short>(bits)});
                }
            }
        }
    }
}

// The same with only the first `present` values in range; the others are zero.
template <int Count, class T>
__device__ __forceinline__ void load_values_guarded(const T* source, int present, float (&values)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        values[i] = i < present ? to_float(source[i]) : 0.0f;
    }
}

}  // namespace qmoe

// Activations of the tokens of a tile in shared memory, as a tensor core takes them for its second operand.
//
// A row is taken in runs of F::kRun inputs, of which lane t of every quad has a quarter. For each run, group of eight
// tokens and part, every lane (g, t) of a warp has 2 * F::kLaneRun bytes: the inputs of token g in the order of
// decode_subgroup. They are stored in vectors of 16 bytes (8 where it has no more), a warp's vectors side by side.
// Parts are bfloat16 that add up to a float: three exactly, two to 2^-16 of it; halves are one part.

#pragma once

#include "grouped_codes.cuh"
#include "quantization.cuh"

namespace qmoe::grouped {

constexpr int kGroupTokens = 8;  // columns of one product
constexpr int kPiece = 16;       // inputs that one thread takes at once

// In place of a load width: floats, aligned to 16 bytes, that the kernel before wrote.
constexpr int kFresh = 0;

// Inputs first to first + 15 of a row of Size, zero past its end, as floats.
template <int Size, int LoadBytes, class T>
__device__ __forceinline__ void load_piece(const T* row, int first, float (&values)[kPiece]) {
    if (Size % kPiece != 0 && first + kPiece > Size) {
        load_values_guarded<kPiece>(row + first, Size - first, values);
    } else if constexpr (LoadBytes == kFresh) {
#pragma unroll
        for (int i = 0; i < kPiece; i += 4) {
            const float4 four = decode::load_fresh(row + first + i);
            values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
        }
    } else {
        load_values<kPiece, LoadBytes>(row + first, values);
    }
}

// The same as they are, two to a word.
template <int Size, int LoadBytes, class T>
__device__ __forceinline__ void load_piece(const T* row, int first, unsigned (&words)[kPiece / 2]) {
    static_assert(sizeof(T) == 2);
    const T* source = row + first;
    if ((Size % kPiece != 0 && first + kPiece > Size) || LoadBytes == 2) {
#pragma unroll
        for (int i = 0; i < kPiece; i += 2) {
            const unsigned low = first + i < Size ? source[i].bits : 0u;
            const unsigned high = first + i + 1 < Size ? source[i + 1].bits : 0u;
            words[i / 2] = low | high << 16;
        }
    } else if constexpr (LoadBytes == 16) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 wide = __ldg(reinterpret_cast<const uint4*>(source) + i);
            words[4 * i] = wide.x, words[4 * i + 1] = wide.y, words[4 * i + 2] = wide.z, words[4 * i + 3] = wide.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kPiece / 2; ++i) {
            words[i] = __ldg(reinterpret_cast<const unsigned*>(source) + i);
        }
    }
}

// Number of the input that half `half` of word `word` of a piece holds.
template <int Sub>
__device__ constexpr int piece_input(int word, int half) {
    return word / (Sub / 2) * Sub + word % (Sub / 2) + half * (Sub / 2);
}

// Floats as Parts - 1 parts, each the upper half of its word, and a rest. What isn't finite is the first part alone.
template <int Parts>
__device__ __forceinline__ void split(float (&rest)[kPiece], unsigned (&upper)[Parts - 1][kPiece]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
        sum += fabsf(rest[i]);
    }
    unsigned wild = 0;
    if (!(sum < kInfinity)) {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
            wild |= fabsf(rest[i]) < kInfinity ? 0u : 1u << i;
            rest[i] = rest[i] == rest[i] ? rest[i] : __uint_as_float(0x7fc00000u);
        }
    }
#pragma unroll
    for (int part = 0; part < Parts - 1; ++part) {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
            upper[part][i] = __float_as_uint(rest[i]) & 0xffff0000u;
            rest[i] -= __uint_as_float(upper[part][i]);
        }
    }
    if (wild) {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
            if (wild >> i & 1u) {
                rest[i] = 0.0f;
#pragma unroll
                for (int part = 1; part < Parts - 1; ++part) {
                    upper[part][i] = 0u;
                }
            }
        }
    }
}

// Store the words of one part of a piece: inputs `within` (a multiple of kPiece) and on of a run, for token g.
template <class F>
__device__ __forceinline__ void store_piece(unsigned char* part, int within, int g, const unsigned (&words)[kPiece / 2]) {
    constexpr int kLane = F::kLaneRun;
    if constexpr (kLane == 4) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            *reinterpret_cast<uint2*>(part + (4 * g + t) * 8) = uint2{words[2 * t], words[2 * t + 1]};
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int input = within + 8 * i;
            unsigned char* place = part + input % kLane / 8 * 512 + (4 * g + input / kLane) * 16;
            *reinterpret_cast<uint4*>(place) = uint4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
        }
    }
}

// Stage inputs of steps [step, step + steps) of the rows of up to eight tokens, the first `count` of which are there:
// row(i) is the row of token i. `target` is where the first run of the group goes, run_bytes what lies between runs.
template <class F, int Parts, int LoadBytes, class T, class Row>
__device__ __forceinline__ void stage_group(Row row, int count, int step, int steps, unsigned char* target, int run_bytes) {
    constexpr int kRunPieces = F::kRun / kPiece;
    constexpr int kPartBytes = 64 * F::kLaneRun;
    const int g = threadIdx.x / kRunPieces % kGroupTokens;
    const int within = threadIdx.x % kRunPieces * kPiece;
    const int runs = steps * F::kRuns, stride = blockDim.x / (kRunPieces * kGroupTokens);
    const bool present = g < count;
    const T* source = row(present ? g : 0);
#pragma unroll 2
    for (int run = threadIdx.x / (kRunPieces * kGroupTokens); run < runs; run += stride) {
        unsigned char* place = target + run * run_bytes;
        const int input = (step * F::kRuns + run) * F::kRun + within;
        unsigned words[kPiece / 2] = {};
        const bool inside = present && input < F::kInFeatures;
        if constexpr (Parts == 1) {
            unsigned loaded[kPiece / 2] = {};
            if (inside) {
                load_piece<F::kInFeatures, LoadBytes>(source, input, loaded);
            }
#pragma unroll
            for (int w = 0; w < kPiece / 2; ++w) {
                constexpr int kSub = F::kSub;
                const int a = piece_input<kSub>(w, 0), b = piece_input<kSub>(w, 1);
                words[w] = __byte_perm(loaded[a / 2], loaded[b / 2], (a % 2 ? 0x0032 : 0x0010) | (b % 2 ? 0x7600 : 0x5400));
            }
            store_piece<F>(place, within, g, words);
        } else {
            float values[kPiece] = {};
            unsigned upper[Parts - 1][kPiece];
            if (inside) {
                load_piece<F::kInFeatures, LoadBytes>(source, input, values);
            }
            split<Parts>(values, upper);
#pragma unroll
            for (int part = 0; part < Parts; ++part) {
#pragma unroll
                for (int w = 0; w < kPiece / 2; ++w) {
                    const int a = piece_input<F::kSub>(w, 0), b = piece_input<F::kSub>(w, 1);
                    words[w] = part < Parts - 1 ? __byte_perm(upper[part < Parts - 1 ? part : 0][a],
                                                              upper[part < Parts - 1 ? part : 0][b], 0x7632)
                                                : round_to_bfloats(values[a], values[b]);
                }
                store_piece<F>(place + part * kPartBytes, within, g, words);
            }
        }
    }
}

}  // namespace qmoe::grouped

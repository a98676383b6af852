// Streaming one tile of 16 weight rows after another through a warp: copies in the background, products on tensor
// cores.
//
// A step is a span of every row of a tile: kLaneCodes of a row for each of the four lanes of a quad, so that a lane
// holds whole quantization blocks, and the products of a block with the activations are one lane's own accumulator:
// the activations are the matrix product's second operand in block-diagonal form, with the piece that belongs to lane
// t of each quad in column 2t and zeros elsewhere. Column 2t + 1 holds what a half can't of a float activation. A
// warp keeps a ring of steps in flight in shared memory. Sizes of matrices are compile-time, for the addresses.

#pragma once

#include "decode_codes.cuh"
#include "quantization.cuh"

namespace qmoe::decode {

constexpr int kTileRows = 16;
constexpr int kHalfTile = 8;

__device__ constexpr int greater(int a, int b) { return a > b ? a : b; }
__device__ constexpr int lesser(int a, int b) { return a < b ? a : b; }

// Format of a matrix as it is streamed. BlockSize 0 is row-wise, which is a block that spans the row. CopyBytes and
// ScaleCopyBytes are the widths of copies to which every row's codes and scales are aligned (and which divide a row);
// ScaleCopyBytes 2 stands for halves in rows of an odd number, which are copied in words that may hold a neighbour.
template <int Bits, int BlockSize, bool ZeroPoints, class ScaleType, int CopyBytes, int ScaleCopyBytes, int OutFeatures,
          int InFeatures>
struct StreamFormat {
    using Scale = ScaleType;
    using Group = CodeGroup<Bits>;
    static constexpr int kBits = Bits;
    static constexpr int kBlockSize = BlockSize;
    static constexpr bool kZeroPoints = ZeroPoints;
    static constexpr int kOutFeatures = OutFeatures;
    static constexpr int kInFeatures = InFeatures;

    static constexpr int kLaneCodes = Bits == 8 ? 32 : Bits == 1 && BlockSize != 16 ? 128 : 64;
    static constexpr int kLaneBytes = kLaneCodes * Bits / 8;
    static constexpr int kLaneWords = kLaneBytes / 4;
    static constexpr int kSpanBytes = 4 * kLaneBytes;
    static constexpr int kStepCodes = 4 * kLaneCodes;
    static constexpr int kRowSteps = (InFeatures + kStepCodes - 1) / kStepCodes;
    // Codes of a lane that share a scale, and are summed in one set of accumulators.
    static constexpr int kFold = BlockSize == 0 ? kLaneCodes : lesser(BlockSize, kLaneCodes);
    static constexpr int kFolds = kLaneCodes / kFold;
    static constexpr int kStepBlocks = BlockSize == 0 ? 1 : greater(kStepCodes / greater(BlockSize, 1), 1);
    static constexpr int kRowBlocks = BlockSize == 0 ? 1 : InFeatures / greater(BlockSize, 1);

    static constexpr int kRowBytes = InFeatures * Bits / 8;
    static constexpr int kCopyBytes = CopyBytes;
    static constexpr int kRowCopies = kSpanBytes / CopyBytes;
    static constexpr int kCopies = kTileRows * kRowCopies / 32;
    static_assert(kTileRows * kRowCopies % 32 == 0, "every lane copies as much");
    static_assert(InFeatures * Bits % 32 == 0, "rows are whole words");

    static constexpr int kScaleRowBytes = kRowBlocks * static_cast<int>(sizeof(ScaleType));
    static constexpr bool kScaleWindow = ScaleCopyBytes == 2;
    static constexpr int kScaleCopyBytes = kScaleWindow ? 4 : ScaleCopyBytes;
    static constexpr int kStepScaleBytes = kStepBlocks * static_cast<int>(sizeof(ScaleType));
    static constexpr int kScaleRowCopies = kScaleWindow ? (kStepScaleBytes + 5) / 4 : kStepScaleBytes / kScaleCopyBytes;
    static constexpr int kScalePitch = kScaleRowCopies * kScaleCopyBytes;
    static constexpr int kScaleCopies = (kTileRows * kScaleRowCopies + 31) / 32;

    static constexpr int kZeroRowBytes = (kRowBlocks * Bits + 7) / 8;
    static constexpr int kStepZeroBits = kStepBlocks * Bits;
    static constexpr int kStepZeroBytes =
        kStepZeroBits % 8 == 0 ? kStepZeroBits / 8 : (kStepZeroBits + 7 + (Bits == 3 ? 7 : 0)) / 8;
    static constexpr int kZeroRowCopies = (kStepZeroBytes + 6) / 4;
    static constexpr int kZeroPitch = kZeroRowCopies * 4;
    static constexpr int kZeroCopies = (kTileRows * kZeroRowCopies + 31) / 32;

    static constexpr int kScaleOffset = kTileRows * kSpanBytes;
    static constexpr int kZeroOffset = kScaleOffset + kTileRows * kScalePitch;
    static constexpr int kStageBytes = (kZeroOffset + (ZeroPoints ? kTileRows * kZeroPitch : 0) + 15) / 16 * 16;

    // What offsets of a row's codes in a stage are xor-ed with, the same again after kSwizzleRows rows: the two loads of
    // a lane are swapped in odd rows, so that eight lanes of two rows meet different banks.
    static constexpr int kSwizzleRows = kLaneBytes == 32 ? 2 : 1;
    static __device__ __forceinline__ int swizzle(int row) { return kLaneBytes == 32 ? (row & 1) << 4 : 0; }
};

// The rows of a tile within one expert: rows 0 to 7 are low + i * stride, rows 8 to 15 high + i * stride, with as many
// of each as the counts say.
struct TileRows {
    int expert;
    int low;
    int high;
    int stride;
    int low_count;
    int high_count;
};

struct TileRow {
    bool high;
    bool present;
    int row;
};

// Row `index` of a tile; where it isn't present, a row that is.
__device__ __forceinline__ TileRow tile_row(const TileRows& tile, int index) {
    const bool high = index % kTileRows >= kHalfTile;
    const int within = index % kHalfTile;
    const bool present = index < kTileRows && within < (high ? tile.high_count : tile.low_count);
    return TileRow{high, present, (high ? tile.high : tile.low) + (present ? within * tile.stride : 0)};
}

// Operands of one matrix over all experts.
struct Operands {
    const unsigned char* codes;
    const unsigned char* scales;
    const unsigned char* zero_points;
};

// The matrices that rows 0 to 7 and rows 8 to 15 of a tile come from.
struct TileMatrices {
    Operands low;
    Operands high;
};

template <class F>
__device__ __forceinline__ long long row_index(int expert, int row) {
    return static_cast<long long>(expert) * F::kOutFeatures + row;
}

// Bit at which a row's zero points begin.
template <class F>
__device__ __forceinline__ long long zero_bit(int expert, int row) {
    if constexpr (F::kBlockSize == 0) {
        return expert * packed_bytes<F::kBits>(F::kOutFeatures) * 8 + static_cast<long long>(row) * F::kBits;
    } else {
        return row_index<F>(expert, row) * F::kZeroRowBytes * 8;
    }
}

// First block of a step.
template <class F>
__device__ __forceinline__ int first_block(int step) {
    return F::kBlockSize == 0 ? 0 : step * F::kStepCodes / greater(F::kBlockSize, 1);
}

// Where bytes of a row of codes lie in a stage.
template <class F>
__device__ __forceinline__ int stage_offset(int row, int offset) {
    return row * F::kSpanBytes + (offset ^ F::swizzle(row));
}

__device__ __forceinline__ const unsigned char* aligned_down(const unsigned char* pointer) {
    return pointer - (reinterpret_cast<unsigned long long>(pointer) & 3);
}

// Copy a word of which the bytes from `end` on are not to be read.
__device__ __forceinline__ void copy_word(unsigned target, const unsigned char* source, const unsigned char* end) {
    const long long left = end - source;
    copy_async_part(target, source, left >= 4 ? 4 : left > 0 ? static_cast<int>(left) : 0);
}

// The copying side of a stream: what a lane fetches of one tile, step after step. Copy i of a lane is of index
// i * 32 + lane among those of the tile, by row; where copies divide a row evenly, a lane's are at one offset of evenly
// spaced rows, so that one pointer to each half of the tile does.
template <class F, int RowStride, bool Ragged>
struct TileCopies {
    static constexpr bool kEven = 32 % F::kRowCopies == 0 && F::kCopies % 2 == 0;
    static constexpr int kPointers = kEven ? 2 : F::kCopies;
    static constexpr int kPerPointer = F::kCopies / kPointers;
    static constexpr int kRowsApart = 32 / F::kRowCopies;  // rows from one of a lane's copies to the next, if even
    static constexpr bool kSameParity = kEven && kRowsApart % F::kSwizzleRows == 0;
    static constexpr int kSpacing = kRowsApart * RowStride * F::kRowBytes;
    static constexpr bool kTail = F::kRowBytes % F::kSpanBytes != 0;
    static constexpr bool kScaleTail = F::kScaleRowBytes % F::kStepScaleBytes != 0;
    static constexpr bool kScaleSteps = F::kBlockSize != 0 && F::kBlockSize <= F::kStepCodes && !F::kScaleWindow;
    static constexpr int kZeroCopies = F::kZeroPoints ? F::kZeroCopies : 1;
    const unsigned char* codes[kPointers];
    const unsigned char* scales[F::kScaleCopies];
    const unsigned char* zero_bytes[kZeroCopies];
    int zero_bits[kZeroCopies];
    int step;

    static __device__ __forceinline__ bool present(const TileRows& tile, int row) {
        return !Ragged || tile_row(tile, row).present;
    }

    __device__ __forceinline__ void open(const TileMatrices& matrices, const TileRows& tile, int first_step, int lane) {
        step = first_step;
#pragma unroll
        for (int i = 0; i < kPointers; ++i) {
            const int index = i * kPerPointer * 32 + lane;
            const TileRow row = tile_row(tile, index / F::kRowCopies);
            codes[i] = (row.high ? matrices.high : matrices.low).codes + row_index<F>(tile.expert, row.row) * F::kRowBytes +
                       (first_step * F::kSpanBytes + index % F::kRowCopies * F::kCopyBytes);
        }
#pragma unroll
        for (int i = 0; i < F::kScaleCopies; ++i) {
            const int index = i * 32 + lane;
            const int offset = F::kScaleWindow ? 0 : index % F::kScaleRowCopies * F::kScaleCopyBytes;
            const TileRow row = tile_row(tile, index / F::kScaleRowCopies);
            scales[i] = (row.high ? matrices.high : matrices.low).scales +
                        row_index<F>(tile.expert, row.row) * F::kScaleRowBytes + offset +
                        (kScaleSteps ? first_step * F::kStepScaleBytes : 0);
        }
        if constexpr (F::kZeroPoints) {
#pragma unroll
            for (int i = 0; i < F::kZeroCopies; ++i) {
                const TileRow row = tile_row(tile, (i * 32 + lane) / F::kZeroRowCopies);
                const long long bit = zero_bit<F>(tile.expert, row.row);
                zero_bytes[i] = (row.high ? matrices.high : matrices.low).zero_points + (bit >> 3);
                zero_bits[i] = static_cast<int>(bit & 7);
            }
        }
    }

    // Begin the copies of the next step into a stage.
    __device__ __forceinline__ void fetch(unsigned stage, const TileRows& tile, int lane) {
        const int left = F::kRowBytes - step * F::kSpanBytes;  // bytes of a row from this step on
        if constexpr (kSameParity) {
            const int row = lane / F::kRowCopies, offset = lane % F::kRowCopies * F::kCopyBytes;
            fetch_codes<0>(stage + stage_offset<F>(row, offset), tile, row, !kTail || offset < left);
        } else {
#pragma unroll
            for (int i = 0; i < F::kCopies; ++i) {
                const int index = i * 32 + lane;
                const int row = index / F::kRowCopies, offset = index % F::kRowCopies * F::kCopyBytes;
                copy_async<F::kCopyBytes>(stage + stage_offset<F>(row, offset),
                                          codes[i / kPerPointer] + (kEven ? i % kPerPointer * kSpacing : 0),
                                          present(tile, row) && (!kTail || offset < left));
            }
        }
#pragma unroll
        for (int i = 0; i < kPointers; ++i) {
            codes[i] += F::kSpanBytes;
        }
        fetch_scales(stage + F::kScaleOffset, tile, lane);
        if constexpr (F::kZeroPoints) {
            fetch_zero_points(stage + F::kZeroOffset, tile, lane);
        }
        ++step;
    }

    template <int i>
    __device__ __forceinline__ void fetch_codes(unsigned target, const TileRows& tile, int row, bool within) const {
        if constexpr (i < F::kCopies) {
            copy_async<F::kCopyBytes, i % kPerPointer * kSpacing, i * kRowsApart * F::kSpanBytes>(
                target, codes[i / kPerPointer], present(tile, row + i * kRowsApart) && within);
            fetch_codes<i + 1>(target, tile, row, within);
        }
    }

    __device__ __forceinline__ void fetch_scales(unsigned target, const TileRows& tile, int lane) {
        const int from = first_block<F>(step) * static_cast<int>(sizeof(typename F::Scale));
#pragma unroll
        for (int i = 0; i < F::kScaleCopies; ++i) {
            const int index = i * 32 + lane;
            if (F::kScaleCopies * 32 > kTileRows * F::kScaleRowCopies && index >= kTileRows * F::kScaleRowCopies) {
                continue;
            }
            const bool row_present = present(tile, index / F::kScaleRowCopies);
            const unsigned place = target + index * F::kScaleCopyBytes;
            if constexpr (F::kScaleWindow) {
                const unsigned char* word = aligned_down(scales[i] + from) + index % F::kScaleRowCopies * 4;
                copy_word(place, word, scales[i] + (row_present ? F::kScaleRowBytes : 0));
            } else {
                const int offset = index % F::kScaleRowCopies * F::kScaleCopyBytes;
                copy_async<F::kScaleCopyBytes>(place, kScaleSteps ? scales[i] : scales[i] + from,
                                               row_present && (!kScaleTail || from + offset < F::kScaleRowBytes));
            }
        }
        if constexpr (kScaleSteps) {
#pragma unroll
            for (int i = 0; i < F::kScaleCopies; ++i) {
                scales[i] += F::kStepScaleBytes;
            }
        }
    }

    __device__ __forceinline__ void fetch_zero_points(unsigned target, const TileRows& tile, int lane) const {
#pragma unroll
        for (int i = 0; i < F::kZeroCopies; ++i) {
            const int index = i * 32 + lane;
            if (index < kTileRows * F::kZeroRowCopies) {
                const int bytes = present(tile, index / F::kZeroRowCopies) ? (zero_bits[i] + F::kRowBlocks * F::kBits + 7) >> 3 : 0;
                const unsigned char* first = zero_bytes[i] + ((zero_bits[i] + first_block<F>(step) * F::kBits) >> 3);
                copy_word(target + index * 4, aligned_down(first) + index % F::kZeroRowCopies * 4, zero_bytes[i] + bytes);
            }
        }
    }
};

// Activations in shared memory, in the order in which codes come out of their groups: pieces of kLaneCodes, for lane t
// of step s piece 4 s + t. Where they are split, 16 bytes of upper halves and 16 bytes of lower halves alternate. With
// every fold of a piece go the sum of its values as multiplied, times 2^-24, and where they are split the root of the
// power of two that takes them back.
template <class F, bool Split>
struct Pieces {
    static constexpr int kBytes = F::kLaneCodes * (Split ? 4 : 2);
    static constexpr int kVectorStride = Split ? 32 : 16;
    static constexpr int kFactorBytes = Split ? 8 : 4;
    static constexpr int kFactorsBytes = F::kFolds * kFactorBytes;
};

constexpr float kCodeScale = 1.0f / 16777216.0f;  // codes are multiplied times 2^-24
constexpr float kCodeUnscale = 16777216.0f;

__device__ constexpr float power_of_minus(int s) { return 1.0f / static_cast<float>(1 << s); }

// The alignment of a lane's rows, on which windows of words depend; nothing where there are none.
struct Windows {
    unsigned scales[2];
    unsigned zero_bits[2];
};

template <class F>
__device__ __forceinline__ Windows windows_of(const TileMatrices& matrices, const TileRows& tile, int lane) {
    Windows result{};
    if constexpr (F::kScaleWindow || F::kZeroPoints) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const TileRow row = tile_row(tile, lane / 4 + half * kHalfTile);
            const Operands& operands = half ? matrices.high : matrices.low;
            result.scales[half] = static_cast<unsigned>(reinterpret_cast<unsigned long long>(operands.scales) +
                                                        row_index<F>(tile.expert, row.row) * F::kScaleRowBytes);
            result.zero_bits[half] = static_cast<unsigned>(
                reinterpret_cast<unsigned long long>(operands.zero_points) * 8 + zero_bit<F>(tile.expert, row.row));
        }
    }
    return result;
}

// The multiplying side: one warp's sums of one tile. Lane (g, t) = (lane / 4, lane % 4) sums its pieces of rows g and
// g + 8. Exact takes every code less its zero point as a half, for activations that aren't finite.
template <class F, bool Split, bool Exact>
struct TileSums {
    using Group = typename F::Group;
    using P = Pieces<F, Split>;
    static constexpr int kClasses = Exact ? 1 : Group::kClasses;
    // Sums stay times 2^-24 until they are read, unless that could underflow.
    static constexpr bool kDeferred = !Exact && !Split && kSameType<typename F::Scale, Float16>;
    static constexpr int kProducts = Group::kCodes / 4;  // of a group
    float low = 0.0f;
    float high = 0.0f;

    struct BlockPair {
        float scale[2];
        unsigned zero[2];
    };

    // Accumulators of one block, one set for each class of pairs.
    using Accumulators = float[kClasses][4];

    // Add the products of one step. `piece` is where lane t's piece of the activations (upper or lower halves) is,
    // `factors` where what goes with it.
    __device__ __forceinline__ void add(unsigned stage, int step, int lane, const Windows& window, unsigned piece,
                                        unsigned factors, unsigned (&b)[2][4]) {
        const int g = lane / 4, t = lane % 4;
        const bool active = Split ? g / 2 == t : g == 2 * t;
        unsigned words[2][F::kLaneWords];
        load_words(stage, g, t, words[0]);
        load_words(stage, g + kHalfTile, t, words[1]);
        if constexpr (F::kFold >= Group::kCodes) {
            constexpr int kGroups = F::kFold / Group::kCodes;
#pragma unroll
            for (int fold = 0; fold < F::kFolds; ++fold) {
                const BlockPair block = block_pair(stage, step, g, t, fold, window);
                Accumulators c = {};
#pragma unroll
                for (int group = fold * kGroups; group < (fold + 1) * kGroups; ++group) {
                    add_group<false>(words, group, block.zero[0] * kBothHalves, block.zero[1] * kBothHalves, active, piece,
                                     b, c, c);
                }
                join(c, block, factors + fold * P::kFactorBytes);
            }
        } else {
            // A group holds two blocks of 16, one in the lower and one in the upper halves of its pairs.
#pragma unroll
            for (int group = 0; group < F::kFolds / 2; ++group) {
                const BlockPair first = block_pair(stage, step, g, t, 2 * group, window);
                const BlockPair second = block_pair(stage, step, g, t, 2 * group + 1, window);
                Accumulators c = {}, d = {};
                add_group<true>(words, group, first.zero[0] | second.zero[0] << 16, first.zero[1] | second.zero[1] << 16,
                                active, piece, b, c, d);
                join(c, first, factors + 2 * group * P::kFactorBytes);
                join(d, second, factors + (2 * group + 1) * P::kFactorBytes);
            }
        }
    }

    // Products of one group of codes: in c or, where the halves of a pair belong to two blocks, in c and d.
    template <bool Halves>
    static __device__ __forceinline__ void add_group(const unsigned (&words)[2][F::kLaneWords], int group,
                                                     unsigned zero_low, unsigned zero_high, bool active, unsigned piece,
                                                     unsigned (&b)[2][4], Accumulators& c, Accumulators& d) {
        unsigned low[Group::kCodes / 2], high[Group::kCodes / 2];
        Group::decode(words[0] + group * Group::kWords, low);
        Group::decode(words[1] + group * Group::kWords, high);
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
            const int product = group * kProducts + i;  // among the piece's; two to a load
            unsigned(&now)[4] = b[product / 2 % 2];
            if (product % 2 == 0) {
                load_shared_if(active, piece + product / 2 * P::kVectorStride, now);
            }
            const unsigned b0 = now[product % 2 * 2], b1 = now[product % 2 * 2 + 1];
            unsigned a[4] = {low[2 * i], high[2 * i], low[2 * i + 1], high[2 * i + 1]};
            const int kind = Exact ? 0 : Group::kClass[i];
            if constexpr (Exact) {
                const int s = Group::kShift[Group::kClass[i]];
                a[0] = difference(a[0], s, zero_low), a[1] = difference(a[1], s, zero_high);
                a[2] = difference(a[2], s, zero_low), a[3] = difference(a[3], s, zero_high);
            }
            if constexpr (Halves) {
                multiply_accumulate(c[kind], a[0], a[1], a[2], a[3], b0 & 0xffffu, b1 & 0xffffu);
                multiply_accumulate(d[kind], a[0], a[1], a[2], a[3], b0 & ~0xffffu, b1 & ~0xffffu);
            } else {
                multiply_accumulate(c[kind], a[0], a[1], a[2], a[3], b0, b1);
            }
        }
    }

    // Put a block's accumulators together and add them, scaled.
    __device__ __forceinline__ void join(const Accumulators& c, const BlockPair& block, unsigned factors) {
        float sum = 0.0f, root = 1.0f;
        if constexpr (Split) {
            unsigned words[2];
            load_shared(factors, words);
            sum = __uint_as_float(words[0]), root = __uint_as_float(words[1]);
        } else if constexpr (!Exact) {
            unsigned words[1];
            load_shared(factors, words);
            sum = __uint_as_float(words[0]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = Split ? c[0][2 * half] + c[0][2 * half + 1] : c[0][2 * half];
#pragma unroll
            for (int i = 1; i < kClasses; ++i) {
                const float own = Split ? c[i][2 * half] + c[i][2 * half + 1] : c[i][2 * half];
                total = fmaf(own, power_of_minus(Group::kShift[i]), total);
            }
            if constexpr (!Exact) {
                total = fmaf(-static_cast<float>(block.zero[half]), sum, total);
                total = kDeferred ? total : total * kCodeUnscale;
            }
            float& target = half ? high : low;
            if constexpr (Split) {
                target = fmaf(total * root * block.scale[half], root, target);
            } else {
                target = fmaf(total, block.scale[half], target);
            }
        }
    }

    static __device__ __forceinline__ void load_words(unsigned stage, int row, int t, unsigned (&words)[F::kLaneWords]) {
        constexpr int kWide = F::kLaneBytes % 16 == 0 ? 4 : 2;
#pragma unroll
        for (int i = 0; i < F::kLaneWords / kWide; ++i) {
            unsigned loaded[kWide];
            load_shared(stage + stage_offset<F>(row, t * F::kLaneBytes + i * kWide * 4), loaded);
#pragma unroll
            for (int j = 0; j < kWide; ++j) {
                words[i * kWide + j] = loaded[j];
            }
        }
    }

    static __device__ __forceinline__ BlockPair block_pair(unsigned stage, int step, int g, int t, int fold,
                                                           const Windows& window) {
        const int block =
            F::kBlockSize == 0 ? 0 : (t * F::kLaneCodes + fold * F::kFold) / greater(F::kBlockSize, 1) % F::kStepBlocks;
        BlockPair result;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = g + half * kHalfTile;
            result.zero[half] = load_zero(stage, row, step, block, window.zero_bits[half]);
            result.scale[half] = load_scale_of(stage, row, step, block, window.scales[half]);
        }
        return result;
    }

    static __device__ __forceinline__ float load_scale_of(unsigned stage, int row, int step, int block, unsigned address) {
        using Scale = typename F::Scale;
        constexpr int kItem = sizeof(Scale);
        unsigned source = stage + F::kScaleOffset + row * F::kScalePitch + block * kItem;
        if constexpr (F::kScaleWindow) {
            source += (address + first_block<F>(step) * kItem) & 3;
        }
        if constexpr (kItem == 4) {
            unsigned words[1];
            load_shared(source, words);
            return __uint_as_float(words[0]);
        } else {
            return to_float(Scale{load_shared_half(source)});
        }
    }

    static __device__ __forceinline__ unsigned load_zero(unsigned stage, int row, int step, int block, unsigned bits) {
        if constexpr (!F::kZeroPoints) {
            return 1u << (F::kBits - 1);
        } else {
            const unsigned window = stage + F::kZeroOffset + row * F::kZeroPitch;
            const unsigned bit = ((bits + first_block<F>(step) * F::kBits) & 31) + block * F::kBits;
            unsigned value = load_shared_byte(window + bit / 8);
            if constexpr (8 % F::kBits != 0) {
                value |= load_shared_byte(window + lesser(bit / 8 + 1, F::kZeroPitch - 1)) << 8;
            }
            return value >> bit % 8 & ((1u << F::kBits) - 1u);
        }
    }

    // Sum the four lanes of each quad: every lane of a quad then holds rows g and g + 8.
    __device__ __forceinline__ void reduce() {
        low = kDeferred ? low * kCodeUnscale : low;
        high = kDeferred ? high * kCodeUnscale : high;
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2) {
            low += __shfl_xor_sync(0xffffffffu, low, offset);
            high += __shfl_xor_sync(0xffffffffu, high, offset);
        }
    }
};

// A warp's stream: steps `first` to `last` - 1 of a sequence of units of kRowSteps steps each, the whole `repeats` times.
// Work says what a unit of a repeat is, tile(repeat, unit) -> TileRows, where its activations are, piece(unit, step) and
// factors(unit, step), and takes what comes out: emit(repeat, unit, row, low, high) for the sums of a unit, or of as much
// of it as this warp has, by the first lanes of the quads.
template <class F, bool Split, int Stages, class Work>
struct WarpStream {
    static constexpr int kPieceStep = 4 * Pieces<F, Split>::kBytes;
    static constexpr int kFactorStep = 4 * Pieces<F, Split>::kFactorsBytes;
    const TileMatrices& matrices;
    const Work& work;
    unsigned ring;
    int first;
    int last;
    int repeats;
    int lane;

    // Where the copies are: in a unit of a repeat, with so many steps of the unit and of the whole left.
    TileCopies<F, Work::kRowStride, !Work::kEven> copies;
    TileRows tile;
    int repeat;
    int unit;
    int unit_left;
    int left;

    __device__ __forceinline__ int begin_of(int u) const { return max(first - u * F::kRowSteps, 0); }
    __device__ __forceinline__ int end_of(int u) const { return min(last - u * F::kRowSteps, F::kRowSteps); }

    __device__ __forceinline__ void open() {
        tile = work.tile(repeat, unit);
        copies.open(matrices, tile, begin_of(unit), lane);
        unit_left = end_of(unit) - begin_of(unit);
    }

    __device__ __forceinline__ void begin() {
        left = (last - first) * repeats;
        repeat = 0;
        unit = first / F::kRowSteps;
        if (left > 0) {
            open();
        }
    }

    // Begin the copies of stages `from` to `to` - 1 of the ring, all of which in turn are to be begun before run.
    __device__ __forceinline__ void fill(int from, int to) {
#pragma unroll 1
        for (int i = from; i < to; ++i) {
            copy_next(ring + i * F::kStageBytes);
        }
    }

    // Begin the next step's copies, if there is one, and close their group either way.
    __device__ __forceinline__ void copy_next(unsigned stage) {
        if (left > 0) {
            copies.fetch(stage, tile, lane);
            --left;
            if (--unit_left == 0 && left > 0) {
                ++unit;
                if (unit * F::kRowSteps >= last) {
                    ++repeat;
                    unit = first / F::kRowSteps;
                }
                open();
            }
        }
        commit_copies();
    }

    template <bool Exact>
    __device__ __forceinline__ void run() {
        if (first >= last) {
            return;
        }
        unsigned b[2][4] = {};
        unsigned stage = ring;
#pragma unroll 1
        for (int now = 0; now < repeats; ++now) {
#pragma unroll 1
            for (int u = first / F::kRowSteps; u * F::kRowSteps < last; ++u) {
                const int begin = begin_of(u), end = end_of(u);
                const Windows window = F::kScaleWindow || F::kZeroPoints
                                           ? windows_of<F>(matrices, work.tile(now, u), lane) : Windows{};
                unsigned piece = work.piece(u, begin, lane);
                unsigned factors = work.factors(u, begin, lane);
                TileSums<F, Split, Exact> sums;
#pragma unroll 1
                for (int step = begin; step < end; ++step) {
                    wait_copies<Stages - 1>();
                    __syncwarp();
                    sums.add(stage, step, lane, window, piece, factors, b);
                    __syncwarp();
                    copy_next(stage);
                    stage = stage == ring + (Stages - 1) * F::kStageBytes ? ring : stage + F::kStageBytes;
                    piece += kPieceStep;
                    factors += kFactorStep;
                }
                sums.reduce();
                if (lane % 4 == 0) {
                    work.emit(now, u, lane / 4, sums.low, sums.high);
                }
            }
        }
    }
};

}  // namespace qmoe::decode

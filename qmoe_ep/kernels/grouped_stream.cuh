// Streaming pairs of tiles of 16 weight rows through a warp, each multiplied with all tokens of its expert at once.
//
// The weights are a product's 16-row operand, eight tokens its columns. A warp takes two tiles of rows side by side:
// gate and up, or two halves of 32 rows. Codes are copied in the background into a ring of steps, as in
// decode_stream.cuh, dequantized exactly into registers once, and multiplied with every group of eight tokens; a
// quantization block's sums are scaled in float. What a block has to do is a contiguous share of the units, a unit
// being a pair of tiles of the rows of one expert; the part of it that lies in one tile of routes is a segment.

#pragma once

#include "decode_stream.cuh"
#include "group.cuh"
#include "grouped_activations.cuh"

namespace qmoe::grouped {

using decode::Operands;
using decode::TileMatrices;
using decode::TileRows;
using decode::Windows;
using decode::greater;
using decode::kHalfTile;
using decode::kTileRows;
using decode::lesser;

// Format of a matrix as it is streamed; parameters as of decode::StreamFormat.
template <int Bits, int BlockSize, bool ZeroPoints, class ScaleType, int CopyBytes, int ScaleCopyBytes, int OutFeatures,
          int InFeatures>
struct RunFormat
    : decode::StreamFormat<Bits, BlockSize, ZeroPoints, ScaleType, CopyBytes, ScaleCopyBytes, OutFeatures, InFeatures> {
    using Stream =
        decode::StreamFormat<Bits, BlockSize, ZeroPoints, ScaleType, CopyBytes, ScaleCopyBytes, OutFeatures, InFeatures>;
    // Codes of a row that share a scale and are multiplied together; a lane of a quad has a quarter of them.
    static constexpr int kRun = BlockSize == 0 ? 128 : lesser(BlockSize, 128);
    static constexpr int kRuns = Stream::kStepCodes / kRun;
    static constexpr int kLaneRun = kRun / 4;
    static constexpr int kLaneBits = kLaneRun * Bits;
    static constexpr int kSub = kSubgroup<Bits, kLaneRun>;
    static_assert(Stream::kStepCodes % kRun == 0, "a step is a whole number of runs");

    // Rows of 16-byte chunks are permuted so that the lanes of one access meet different banks.
    static constexpr int kChunks = Stream::kSpanBytes / 16;
    static constexpr int kRunChunks = greater(kRun * Bits / 128, 1);
    static constexpr int kLineRows = kChunks == 4 ? 2 : 1;
    static constexpr bool kEvenChunks = kChunks == 4 || kChunks == 8;
    static constexpr int kWays = kEvenChunks ? greater(kChunks / kRunChunks, 1) : 1;
    static constexpr int kSwizzleRows = !kEvenChunks ? 1 : kWays > 1 ? kLineRows * kWays : 2;
    static __device__ __forceinline__ int swizzle(int row) {
        if constexpr (!kEvenChunks) {
            return 0;
        } else if constexpr (kWays == 1) {
            return (row & 1) << 4;
        } else {
            return (row / kLineRows & (kWays - 1)) * kRunChunks << 4;
        }
    }
};

// Where the bits of one lane's quarter of a run lie, right-aligned in words; zeros above them.
template <class F>
__device__ __forceinline__ void load_run(unsigned stage, int row, int run, int t,
                                         unsigned (&words)[(F::kLaneBits + 31) / 32]) {
    constexpr int kBits = F::kLaneBits;
    const int start = run * (F::kRun * F::kBits / 8);
    const auto at = [&](int byte) { return stage + decode::stage_offset<F>(row, start + byte); };
    if constexpr (kBits % 64 == 0) {
        constexpr int kWide = kBits % 128 == 0 ? 4 : 2;
#pragma unroll
        for (int i = 0; i < kBits / (32 * kWide); ++i) {
            unsigned loaded[kWide];
            decode::load_shared(at(t * (kBits / 8) + i * kWide * 4), loaded);
#pragma unroll
            for (int j = 0; j < kWide; ++j) {
                words[i * kWide + j] = loaded[j];
            }
        }
    } else if constexpr (kBits % 32 == 0) {
#pragma unroll
        for (int i = 0; i < kBits / 32; ++i) {
            unsigned loaded[1];
            decode::load_shared(at(t * (kBits / 8) + i * 4), loaded);
            words[i] = loaded[0];
        }
    } else if constexpr (kBits == 16) {
        words[0] = decode::load_shared_half(at(2 * t));
    } else if constexpr (kBits <= 8) {
        words[0] = decode::load_shared_byte(at(t * kBits / 8)) >> t * kBits % 8 & ((1u << kBits) - 1u);
    } else {
        // 12, 24 or 48 bits from halves of words on.
        constexpr int kHalves = (kBits + 15) / 16 + (kBits % 16 != 0 && kBits < 24 ? 1 : 0);
        const int bit = t * kBits, shift = bit % 16;
        unsigned parts[kHalves];
#pragma unroll
        for (int i = 0; i < kHalves; ++i) {
            parts[i] = decode::load_shared_half(at(lesser(bit / 16 + i, F::kRun * F::kBits / 16 - 1) * 2));
        }
        words[0] = (parts[0] | parts[1] << 16) >> shift;
        if constexpr (kBits == 48) {
            words[1] = parts[2];
        } else {
            words[0] &= (1u << kBits) - 1u;
        }
    }
}

// Subgroup `index` of what load_run gives.
template <class F>
__device__ __forceinline__ unsigned subgroup_bits(const unsigned (&words)[(F::kLaneBits + 31) / 32], int index) {
    constexpr int kBits = F::kSub * F::kBits;
    if constexpr (kBits == F::kLaneBits || kBits == 32) {
        return words[index * kBits / 32];
    } else {
        const int word = index * kBits / 32, shift = index * kBits % 32;
        unsigned bits = words[word] >> shift;
        if (shift + kBits > 32) {
            bits |= words[lesser(word + 1, (F::kLaneBits + 31) / 32 - 1)] << (32 - shift);
        }
        return bits & ((1u << kBits % 32) - 1u);
    }
}

// Binary logarithm of a power of two.
__device__ constexpr int bits_of(int power) { return power > 1 ? 1 + bits_of(power / 2) : 0; }

// The multiplying side: one warp's sums of one unit, for up to Groups groups of tokens. Lane (g, t) has rows g and g + 8
// of each tile for tokens 2t and 2t + 1 of each group.
template <class F, class Element, int Parts, int Groups>
struct UnitSums {
    static constexpr int kProducts = F::kLaneRun / 4;  // of a run, part and tile
    static constexpr int kPairs = F::kSub / 2;
    static constexpr int kPartBytes = 64 * F::kLaneRun;
    // So that the sum of a run is at most as large as its largest activation; taken back by unscale().
    static constexpr int kDown = Element::kMantissa < 10 ? F::kBits + bits_of(F::kRun) : 0;
    using Reader = decode::TileSums<F, true, true>;
    float total[Groups][2][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int group = 0; group < Groups; ++group) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                total[group][i / 4][i % 4] = 0.0f;
            }
        }
    }

    // Add the products of one step. `tokens` is where the step's activations of this lane are, of `groups` groups.
    __device__ __forceinline__ void add(unsigned stage, int step, int lane, const Windows (&windows)[2], unsigned tokens,
                                        int groups) {
        constexpr int kUnroll = lesser(F::kRuns, Groups == 1 && Parts < 3 ? 8 : 2);
        const int run_bytes = groups * Parts * kPartBytes;
#pragma unroll kUnroll
        for (int run = 0; run < F::kRuns; ++run) {
            unsigned a[2][kProducts][4];
            float scale[2][2];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    decode_rows(stage + tile * F::kStageBytes, step, run, lane, half, windows[tile], a[tile],
                                scale[tile][half]);
                }
            }
#pragma unroll
            for (int group = 0; group < Groups; ++group) {
                if (Groups == 1 || group < groups) {
                    multiply(a, scale, tokens + group * (Parts * kPartBytes), total[group]);
                }
            }
            tokens += run_bytes;
        }
    }

    static __device__ __forceinline__ void decode_rows(unsigned stage, int step, int run, int lane, int half,
                                                       const Windows& window, unsigned (&a)[kProducts][4], float& scale) {
        const int row = lane / 4 + half * kHalfTile;
        const int block = F::kBlockSize == 0 ? 0 : run * F::kRun / greater(F::kBlockSize, 1) % F::kStepBlocks;
        unsigned words[(F::kLaneBits + 31) / 32];
        load_run<F>(stage, row, run, lane % 4, words);
        const unsigned zero = Reader::load_zero(stage, row, step, block, window.zero_bits[half]) * kBothHalves;
        scale = Reader::load_scale_of(stage, row, step, block, window.scales[half]);
#pragma unroll
        for (int sub = 0; sub < F::kLaneRun / F::kSub; ++sub) {
            unsigned pairs[kPairs];
            decode_subgroup<Element, F::kBits, F::kSub, kDown>(subgroup_bits<F>(words, sub), zero, pairs);
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                const int pair = sub * kPairs + i;
                a[pair / 2][half + pair % 2 * 2] = pairs[i];
            }
        }
    }

    static __device__ __forceinline__ void multiply(const unsigned (&a)[2][kProducts][4], const float (&scale)[2][2],
                                                    unsigned tokens, float (&total)[2][4]) {
        float c[2][4] = {};
#pragma unroll
        for (int part = 0; part < Parts; ++part) {
            if constexpr (kProducts == 1) {
                unsigned b[2];
                decode::load_shared(tokens + part * kPartBytes, b);
                Element::multiply(c[0], a[0][0], b[0], b[1]);
                Element::multiply(c[1], a[1][0], b[0], b[1]);
            } else {
#pragma unroll
                for (int i = 0; i < kProducts; i += 2) {
                    unsigned b[4];
                    decode::load_shared(tokens + part * kPartBytes + i * 256, b);
                    Element::multiply(c[0], a[0][i], b[0], b[1]);
                    Element::multiply(c[1], a[1][i], b[0], b[1]);
                    Element::multiply(c[0], a[0][i + 1], b[2], b[3]);
                    Element::multiply(c[1], a[1][i + 1], b[2], b[3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            total[i / 4][i % 4] = fmaf(c[i / 4][i % 4], scale[i / 4][i % 4 / 2], total[i / 4][i % 4]);
        }
    }

    __device__ __forceinline__ void unscale() {
        if constexpr (kDown > 0) {
#pragma unroll
            for (int group = 0; group < Groups; ++group) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    total[group][i / 4][i % 4] *= static_cast<float>(1 << kDown);
                }
            }
        }
    }

    // A warp's sums in shared memory, `groups` kilobytes.
    __device__ __forceinline__ void store(float* slot, int lane, int groups) const {
#pragma unroll
        for (int group = 0; group < Groups; ++group) {
            if (group < groups) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    slot[(group * 8 + i) * 32 + lane] = total[group][i / 4][i % 4];
                }
            }
        }
    }

    __device__ __forceinline__ void add(const float* slot, int lane, int groups) {
#pragma unroll
        for (int group = 0; group < Groups; ++group) {
            if (group < groups) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    total[group][i / 4][i % 4] += slot[(group * 8 + i) * 32 + lane];
                }
            }
        }
    }
};

// The part of `total` that `index` of `count` owns: from part_start(index) to part_start(index + 1).
__device__ __forceinline__ int part_start(int total, int index, int count) {
    return static_cast<int>(static_cast<long long>(total) * index / count);
}

// Units `unit` to `unit + units - 1` of an expert for `count` routes from entry `first` of the grouped ones on. Where the
// activations of a row don't fit shared memory, a segment is gone through in chunks of as many steps.
struct Segment {
    int expert;
    int first;
    int count;
    int unit;
    int units;
    int groups;
    int chunk_steps;
    int chunks;
};

// What a block of a grouped product has to do: units `begin` to `end` - 1 of the tiles of routes times the units of a
// matrix; and what its shared memory holds, bytes of activations and sums of units of one group.
struct Share {
    const GroupTile* tiles;
    int begin;
    int end;
    int token_bytes;
    int slots;
};

template <class L>
__device__ __forceinline__ Segment segment_at(const Share& share, int position, int warps) {
    using F = typename L::Format;
    constexpr int kStepBytes = kGroupTokens * L::kParts * F::kStepCodes * 2;
    const int4 tile = load_fresh(reinterpret_cast<const int4*>(share.tiles + position / L::kUnits));
    Segment s;
    s.expert = tile.x, s.first = tile.y, s.count = tile.z;
    s.unit = position % L::kUnits;
    s.units = min(L::kUnits - s.unit, share.end - position);
    s.groups = (s.count + kGroupTokens - 1) / kGroupTokens;
    s.chunks = 1;
    s.chunk_steps = F::kRowSteps;
    if (F::kRowSteps * kStepBytes * s.groups > share.token_bytes) {
        const int most = share.token_bytes / (kStepBytes * s.groups);
        s.chunks = (F::kRowSteps + most - 1) / most;
        s.chunk_steps = (F::kRowSteps + s.chunks - 1) / s.chunks;
        s.units = min(s.units, share.slots / s.groups - warps);
    }
    return s;
}

// The steps of one warp within a segment: of every chunk, `first` to `last` - 1 of all units' steps.
struct Span {
    int first;
    int last;
    int chunk_steps;
    __device__ __forceinline__ Span(const Segment& s, int warp, int warps)
        : first(part_start(s.units * s.chunk_steps, warp, warps)),
          last(part_start(s.units * s.chunk_steps, warp + 1, warps)),
          chunk_steps(s.chunk_steps) {}
    __device__ __forceinline__ int begin_of(int unit) const { return max(first - unit * chunk_steps, 0); }
    __device__ __forceinline__ int end_of(int unit) const { return min(last - unit * chunk_steps, chunk_steps); }
};

// The copying side: a warp's way through its block's share, ahead of the products.
template <class L>
struct UnitCopies {
    using F = typename L::Format;
    static constexpr int kStageBytes = 2 * F::kStageBytes;
    const L& work;
    const Share& share;
    unsigned ring;
    int warp;
    int warps;
    int lane;

    decode::TileCopies<F, L::kRowStride, !L::kEven> copies[2];
    TileRows rows[2];
    int position;
    Segment segment;
    int chunk;
    int unit;  // of the segment
    int left;  // steps of it

    // Fill the ring.
    template <int Stages>
    __device__ __forceinline__ void begin() {
        position = share.begin;
        left = 0;
        if (position < share.end) {
            segment = segment_at<L>(share, position, warps);
            const Span span(segment, warp, warps);
            chunk = 0;
            unit = span.first / span.chunk_steps - 1;
            seek();
        }
#pragma unroll 1
        for (int i = 0; i < Stages; ++i) {
            next(ring + i * kStageBytes);
        }
    }

    // Go on to the next unit of which this warp has steps; `left` stays 0 if there is none.
    __device__ __forceinline__ void seek() {
        for (;;) {
            Span span(segment, warp, warps);
            ++unit;
            if (unit * span.chunk_steps >= span.last) {
                ++chunk;
                if (chunk >= segment.chunks || span.first >= span.last) {
                    position += segment.units;
                    if (position >= share.end) {
                        return;
                    }
                    segment = segment_at<L>(share, position, warps);
                    span = Span(segment, warp, warps);
                    chunk = 0;
                }
                unit = span.first / span.chunk_steps;
                if (span.first >= span.last) {
                    continue;
                }
            }
            const int base = chunk * span.chunk_steps, first = base + span.begin_of(unit);
            left = max(min(base + span.end_of(unit), F::kRowSteps) - first, 0);
            if (left > 0) {
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    rows[tile] = work.rows(segment.expert, segment.unit + unit, tile);
                    copies[tile].open(work.matrices(tile), rows[tile], first, lane);
                }
                return;
            }
        }
    }

    // Begin the next step's copies, if there is one, and close their group either way.
    __device__ __forceinline__ void next(unsigned stage) {
        if (left > 0) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                copies[tile].fetch(stage + tile * F::kStageBytes, rows[tile], lane);
            }
            if (--left == 0) {
                seek();
            }
        }
        decode::commit_copies();
    }
};

}  // namespace qmoe::grouped

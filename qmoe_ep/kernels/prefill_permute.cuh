// Input vectors in the order of positions, as the first product reads them.

#pragma once

#include "prefill_arguments.cuh"
#include "prefill_pipeline.cuh"

namespace qmoe::prefill {

constexpr int kPermuteThreads = 256;

// Eight consecutive halves of a row, two to a register.
template <int LoadBytes>
__device__ __forceinline__ uint4 load_halves(const unsigned short* source) {
    if constexpr (LoadBytes == 16) {
        return __ldg(reinterpret_cast<const uint4*>(source));
    } else {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = __ldg(source + 2 * i) | static_cast<unsigned>(__ldg(source + 2 * i + 1)) << 16;
        }
        return uint4{words[0], words[1], words[2], words[3]};
    }
}

// List the tiles again in pieces for the exact kernels, keep those idle until somebody finds them needed, and forget what
// was known of routes.
__device__ __forceinline__ void prepare_exact(const PermuteArguments& a) {
    const int thread = blockIdx.x * kPermuteThreads + threadIdx.x, threads = gridDim.x * kPermuteThreads;
    if (thread == 0) {
        *a.exact_tile_count = 0;
    }
    for (long long i = thread; i < 2ll * a.routes; i += threads) {
        a.route_state[i] = 0;
    }
    const int rows = kTileTokens / a.exact_split;
    for (int i = thread; i < a.tile_ends[kClasses - 1] * a.exact_split; i += threads) {
        const GroupTile tile = a.tiles[i / a.exact_split];
        const int first = i % a.exact_split * rows;
        a.exact_tiles[i] = GroupTile{tile.expert, tile.first + first, min(max(tile.count - first, 0), rows), 0};
    }
}

// A warp owns a row of the input at a time: it writes the row in the order of positions, padded with zeros to whole
// steps. A lane moves 4 pieces of 8 elements, which the permutation turns into 4 others. Bound by memory. With `checked`
// it also prepares what finds values that f16 can't hold.
template <int LoadBytes, bool checked>
__device__ __forceinline__ void permute(const PermuteArguments& a) {
    dependent_begin();
    if constexpr (checked) {
        prepare_exact(a);
    }
    const int units = padded_steps(a.hidden) * 4;
    const int lane = threadIdx.x % 32, warps = gridDim.x * (kPermuteThreads / 32);
    for (int row = blockIdx.x * (kPermuteThreads / 32) + threadIdx.x / 32; row < a.rows; row += warps) {
        const unsigned short* source =
            static_cast<const unsigned short*>(a.input) + static_cast<long long>(row) * a.hidden;
        unsigned char* to_row = a.workspace + a.tokens_offset + static_cast<long long>(row) * units * 64;
        unsigned any = 0;
#pragma unroll 2
        for (int unit = lane; unit < units; unit += 32) {
            const int step = unit / 4, w = unit % 4;
            unsigned words[4][4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int inner = kStepInner * step + kLaneCodes * c + 8 * w;
                uint4 piece = uint4{};
                if (inner < a.hidden) {
                    piece = load_halves<LoadBytes>(source + inner);
                }
                words[c][0] = piece.x, words[c][1] = piece.y, words[c][2] = piece.z, words[c][3] = piece.w;
                any |= (piece.x | piece.y | piece.z | piece.w) & 0x7fff7fffu;
            }
            uint4* to = reinterpret_cast<uint4*>(to_row + 64ll * unit);
#pragma unroll
            for (int t = 0; t < 2; ++t) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const unsigned select = h ? 0x7632 : 0x5410;
                    to[2 * t + h] = uint4{__byte_perm(words[0][t], words[0][2 + t], select),
                                          __byte_perm(words[1][t], words[1][2 + t], select),
                                          __byte_perm(words[2][t], words[2][2 + t], select),
                                          __byte_perm(words[3][t], words[3][2 + t], select)};
                }
            }
        }
        if constexpr (checked) {
            const bool zero = !__any_sync(kAllLanes, any);
            if (lane == 0) {
                a.zero_rows[row] = zero;
            }
        }
    }
}

}  // namespace qmoe::prefill

// Input vectors gathered by route into the image that the first product reads.

#pragma once

#include "prefill_arguments.cuh"
#include "prefill_pipeline.cuh"

namespace qmoe::prefill {

constexpr int kGatherThreads = 256;
constexpr int kGatherRoutes = 8;  // per block and turn, one to a warp

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

// List the tiles again in pieces for the exact kernels, and keep those idle until somebody finds them needed.
__device__ __forceinline__ void prepare_exact(const GatherArguments& a, const GroupTile& tile, int index) {
    if (static_cast<int>(threadIdx.x) < a.exact_split) {
        const int piece = threadIdx.x;
        const int rows = kTileTokens / a.exact_split;
        const int count = min(max(tile.count - piece * rows, 0), rows);
        a.exact_tiles[static_cast<long long>(index) * a.exact_split + piece] =
            GroupTile{tile.expert, tile.first + piece * rows, count, 0};
    }
}

// A warp owns a route of a tile at a time: it reads the route's input vector and writes it in image order, padded with
// zeros to whole steps. A lane moves 4 pieces of 8 elements, which the permutation turns into 4 others. Bound by the
// writing. With `checked` it also prepares what finds values that f16 can't hold.
template <int LoadBytes, bool checked>
__device__ __forceinline__ void gather(const GatherArguments& a) {
    dependent_begin();
    const int tile_count = *a.tile_count;
    const int units = padded_steps(a.hidden) * 4;
    constexpr int kTurns = kTileTokens / kGatherRoutes;
    const int turn_route = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (checked && blockIdx.x == 0 && threadIdx.x == 0) {
        *a.exact_tile_count = 0;
    }
    for (int item = blockIdx.x; item < tile_count * kTurns; item += gridDim.x) {
        const GroupTile tile = a.tiles[item / kTurns];
        const int first = item % kTurns * kGatherRoutes;
        if (checked && first == 0) {
            prepare_exact(a, tile, item / kTurns);
        }
        const int route = first + turn_route;
        if (route >= tile.count) {
            continue;
        }
        const long long row = image_row(tile.first, tile.expert) + route;
        const int token = a.grouped_routes[tile.first + route] / a.top_k;
        const unsigned short* source =
            static_cast<const unsigned short*>(a.input) + static_cast<long long>(token) * a.hidden;
        unsigned char* image = a.workspace + a.tokens_offset + row * kPanelRowBytes;
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
            uint4* to = reinterpret_cast<uint4*>(image + (2ll * step + w / 2) * a.image_rows * kPanelRowBytes);
#pragma unroll
            for (int t = 0; t < 2; ++t) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const unsigned select = h ? 0x7632 : 0x5410;
                    to[(4 * (w % 2) + 2 * t + h) ^ turn_route] =
                        uint4{__byte_perm(words[0][t], words[0][2 + t], select),
                              __byte_perm(words[1][t], words[1][2 + t], select),
                              __byte_perm(words[2][t], words[2][2 + t], select),
                              __byte_perm(words[3][t], words[3][2 + t], select)};
                }
            }
        }
        if constexpr (checked) {
            const bool zero = !__any_sync(kAllLanes, any);
            if (lane == 0) {
                a.route_state[row] = zero ? kZeroInput : kUnknown;
                a.route_state[a.image_rows + row] = 0;
            }
        }
    }
}

}  // namespace qmoe::prefill

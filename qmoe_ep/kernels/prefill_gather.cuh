// Input vectors gathered by route into the image that the first product reads.

#pragma once

#include "prefill_arguments.cuh"

namespace qmoe::prefill {

constexpr int kGatherThreads = 256;
constexpr int kGatherRoutes = 8;  // per block and turn

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
        return make_uint4(words[0], words[1], words[2], words[3]);
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

// A block owns 8 routes of a tile at a time: it reads their input vectors and writes them in image order, padded with
// zeros to whole steps. A thread moves 4 pieces of 8 elements, which the permutation turns into 4 other pieces of 8.
// Bound by the writing. With `checked` it also prepares what finds values that f16 can't hold.
template <int LoadBytes, bool checked>
__device__ __forceinline__ void gather(const GatherArguments& a) {
    __shared__ int nonzero[kGatherRoutes];
    const int tile_count = *a.tile_count;
    const int units = padded_steps(a.hidden) * 4;
    constexpr int kTurns = kTileTokens / kGatherRoutes;
    if (checked && blockIdx.x == 0 && threadIdx.x == 0) {
        *a.exact_tile_count = 0;
    }
    for (long long item = blockIdx.x; item < static_cast<long long>(tile_count) * kTurns; item += gridDim.x) {
        const GroupTile tile = a.tiles[item / kTurns];
        const int first = static_cast<int>(item % kTurns) * kGatherRoutes;
        if (checked && first == 0) {
            prepare_exact(a, tile, static_cast<int>(item / kTurns));
        }
        const int count = min(tile.count - first, kGatherRoutes);
        if (count <= 0) {
            continue;
        }
        if constexpr (checked) {
            if (threadIdx.x < kGatherRoutes) {
                nonzero[threadIdx.x] = 0;
            }
            __syncthreads();
        }
        const long long row = image_row(tile.first, tile.expert) + first;
        for (int i = threadIdx.x; i < count * units; i += kGatherThreads) {
            const int route = i / units, unit = i % units;
            const int step = unit / 4, w = unit % 4;
            const int token = a.grouped_routes[tile.first + first + route] / a.top_k;
            const unsigned short* source =
                static_cast<const unsigned short*>(a.input) + static_cast<long long>(token) * a.hidden;
            unsigned words[4][4];
            unsigned any = 0;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int inner = kStepInner * step + kLaneCodes * c + 8 * w;
                uint4 piece = make_uint4(0, 0, 0, 0);
                if (inner < a.hidden) {
                    piece = load_halves<LoadBytes>(source + inner);
                }
                words[c][0] = piece.x, words[c][1] = piece.y, words[c][2] = piece.z, words[c][3] = piece.w;
                any |= (piece.x | piece.y | piece.z | piece.w) & 0x7fff7fffu;
            }
            if (checked && any) {
                nonzero[route] = 1;
            }
            unsigned char* panel = a.workspace + a.tokens_offset +
                                   ((2ll * step + w / 2) * a.image_rows + row + route) * kPanelRowBytes;
#pragma unroll
            for (int t = 0; t < 2; ++t) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const unsigned select = h ? 0x7632 : 0x5410;
                    const int piece = 4 * (w % 2) + 2 * t + h;
                    reinterpret_cast<uint4*>(panel)[piece ^ route] =
                        make_uint4(__byte_perm(words[0][t], words[0][2 + t], select),
                                   __byte_perm(words[1][t], words[1][2 + t], select),
                                   __byte_perm(words[2][t], words[2][2 + t], select),
                                   __byte_perm(words[3][t], words[3][2 + t], select));
                }
            }
        }
        if constexpr (checked) {
            __syncthreads();
            if (static_cast<int>(threadIdx.x) < count) {
                a.route_state[row + threadIdx.x] = nonzero[threadIdx.x] ? kUnknown : kZeroInput;
                a.route_state[a.image_rows + row + threadIdx.x] = 0;
            }
            __syncthreads();
        }
    }
}

}  // namespace qmoe::prefill

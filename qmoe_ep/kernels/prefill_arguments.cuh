// Arguments, tiles and scratch layout of the prefill kernels.
//
// Token tiles are the group tiles of up to 128 routes of one expert. The vectors that are multiplied, input and activated,
// are rows of halves in the order of positions (see prefill_fragments.cuh), padded with zeros to whole steps.

#pragma once

#include "activation.cuh"
#include "group.cuh"
#include "prefill_fragments.cuh"

namespace qmoe::prefill {

constexpr int kTileTokens = 128;
constexpr int kTileRows = 256;      // weight rows of a block
constexpr int kWarps = 8;
constexpr int kBands = 2;           // of a warp, 16 weight rows each: band kBands * warp + b of the tile
constexpr int kLanes = 32 * kWarps;   // threads that multiply
constexpr int kFeeders = 128;         // threads that fill stages
constexpr int kThreads = kLanes + kFeeders;
constexpr int kPanelRowBytes = 128;
constexpr int kTilesTogether = 8;   // token tiles that neighbouring blocks multiply with the same weight rows
constexpr int kCheckedBand = 3;     // whose activated features stand for their route's magnitude
constexpr float kSmallActivated = 1.0f / 4096.0f;

struct PermuteArguments {
    const void* input;          // [rows, hidden]
    const GroupTile* tiles;
    const int* tile_ends;         // [kClasses], where the tiles of each class end
    unsigned char* workspace;     // vectors of the input at tokens_offset
    // The rest only for halves that may flush.
    unsigned char* zero_rows;     // [rows], 1 where the whole row is zero
    unsigned char* route_state;   // [2, routes], see note_magnitudes
    GroupTile* exact_tiles;       // [tiles, exact_split]
    int* exact_tile_count;        // [1], zero unless the exact kernels must run
    long long tokens_offset;
    int rows;
    int routes;
    int hidden;
    int exact_split;
};

struct GateUpArguments {
    const unsigned char* fc1_weights;
    const void* fc1_scales;
    const void* fc1_bias;
    const unsigned char* fc1_zero_points;
    const unsigned char* fc3_weights;
    const void* fc3_scales;
    const void* fc3_bias;
    const unsigned char* fc3_zero_points;
    const int* grouped_routes;    // see GroupArguments
    const GroupTile* tiles;
    const int* tile_ends;         // [kClasses], where the tiles of each class end
    unsigned char* workspace;     // activated by entry of grouped_routes; at tokens_offset the input by row
    unsigned char* route_state;
    int* exact_tile_count;
    long long tokens_offset;
    LaneRowsApart apart;          // from a gate row to its up row, or between features 128 apart; and to the next feature
    int routes;
    int top_k;
    int hidden;
    int inter;
    int exact_split;
    GateScalars scalars;
};

struct DownArguments {
    const unsigned char* fc2_weights;
    const void* fc2_scales;
    const void* fc2_bias;
    const unsigned char* fc2_zero_points;
    const int* grouped_routes;
    const GroupTile* tiles;
    const int* tile_ends;         // [kClasses], where the tiles of each class end
    const unsigned char* workspace;
    const unsigned char* zero_rows;
    const unsigned char* route_state;
    int* exact_tile_count;
    float* contributions;         // [routes, hidden]
    LaneRowsApart apart;          // between features 8 and 16 apart
    int routes;
    int top_k;
    int row_bytes;                // of an activated vector
    int hidden;
    int inter;
    int exact_split;
};

__device__ __forceinline__ int padded_steps(int inner) { return (inner + kStepInner - 1) / kStepInner; }

// A block's unit of work: a token tile times kTileRows weight rows.
struct Work {
    int expert;
    int first;  // entry of grouped_routes
    int count;
    int row_tile;
};

// All work of a launch, ordered so that blocks running at one time share weight rows and tokens in the second-level cache.
struct Items {
    const GroupTile* tiles;
    int tile_count;
    int row_tiles;

    // Of one class.
    __device__ __forceinline__ static Items of(const GroupTile* tiles, const int* ends, int which, int row_tiles) {
        const int begin = which ? ends[which - 1] : 0;
        return Items{tiles + begin, ends[which] - begin, row_tiles};
    }

    __device__ __forceinline__ int count() const { return tile_count * row_tiles; }

    __device__ __forceinline__ Work at(int item) const {
        const int per_chunk = kTilesTogether * row_tiles;
        const int first_tile = item / per_chunk * kTilesTogether;
        const int rest = item % per_chunk;
        const int together = min(kTilesTogether, tile_count - first_tile);
        const GroupTile tile = tiles[first_tile + rest % together];
        return Work{tile.expert, tile.first, tile.count, rest / together};
    }
};

// Tiles are multiplied as classes by their number of tokens, each by a kernel for its width: with several widths in one
// kernel the compiler gives up on overlapping products. Tiles are listed by class, wide ones first.
constexpr int kClasses = 3;
constexpr int kClassTokens[kClasses] = {kTileTokens, 64, 32};

__device__ __forceinline__ int tile_class(int count) {
    return count > kClassTokens[1] ? 0 : count > kClassTokens[2] ? 1 : 2;
}

}  // namespace qmoe::prefill

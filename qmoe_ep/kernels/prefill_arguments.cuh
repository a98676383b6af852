// Arguments, tiles and scratch layout of the prefill kernels.
//
// Token tiles are the group tiles of up to 128 routes of one expert. Their vectors lie in *images*, stored as the
// tensor cores read them: panels of 64 positions (see prefill_fragments.cuh); in a panel one row of 128 bytes per
// route; in a row the 16-byte piece q at place q ^ (row % 8). An image row of a tile's first route is a multiple of 8
// that needs no prefix sum, see image_row. So a tile's share of a panel is contiguous and is fetched by one bulk copy.

#pragma once

#include "activation.cuh"
#include "group.cuh"
#include "prefill_fragments.cuh"

namespace qmoe::prefill {

constexpr int kTileTokens = 128;
constexpr int kTileRows = 256;      // weight rows of a block
constexpr int kWarps = 8;
constexpr int kBands = 2;           // of a warp, 16 weight rows each: band kBands * warp + b of the tile
constexpr int kThreads = 32 * kWarps;
constexpr int kPanelRowBytes = 128;
constexpr int kTilesTogether = 8;   // token tiles that neighbouring blocks multiply with the same weight rows
constexpr int kCheckedBand = 3;     // whose activated features stand for their route's magnitude
constexpr float kSmallActivated = 1.0f / 4096.0f;

struct GatherArguments {
    const void* input;          // [rows, hidden]
    const int* grouped_routes;  // see GroupArguments
    const GroupTile* tiles;
    const int* tile_count;
    unsigned char* workspace;
    unsigned char* route_state;   // [2, image_rows], halves that may flush only: see RouteState
    GroupTile* exact_tiles;       // [tiles, exact_split], halves that may flush only
    int* exact_tile_count;        // [1], likewise: zero unless the exact kernels must run
    long long image_rows;
    long long tokens_offset;
    int top_k;
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
    const GroupTile* tiles;
    const int* tile_count;
    unsigned char* workspace;     // image of activated, then, at tokens_offset, image of the input
    unsigned char* route_state;
    int* exact_tile_count;
    long long image_rows;
    long long tokens_offset;
    LaneRowsApart apart;          // from a gate row to its up row, or between features 128 apart; and to the next feature
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
    const int* tile_count;
    const unsigned char* workspace;
    const unsigned char* route_state;
    int* exact_tile_count;
    float* contributions;         // [routes, hidden]
    long long image_rows;
    LaneRowsApart apart;          // between features 8 and 16 apart
    int hidden;
    int inter;
    int exact_split;
};

// What is known about a route's activated features, in f16, where small ones may flush: the first of the two bytes.
// The second byte is 1 if the checked warp saw a small feature that isn't zero.
enum RouteState : unsigned char { kUnknown = 0, kLargeSeen = 1, kZeroInput = 2 };

// The image row of a tile's first route: experts' groups start at multiples of 8 and can't overlap, because each is
// moved up by 8 rows per expert before it.
__device__ __forceinline__ long long image_row(int first, int expert) {
    return (static_cast<long long>(first) + 7) / 8 * 8 + 8ll * expert;
}

__device__ __forceinline__ int padded_steps(int inner) { return (inner + kStepInner - 1) / kStepInner; }

// A block's unit of work: a token tile times kTileRows weight rows.
struct Work {
    int expert;
    int first;  // entry of grouped_routes
    int count;
    int row_tile;
};

// Items are ordered so that blocks running at one time share weight rows and tokens in the second-level cache.
__device__ __forceinline__ Work work_item(const GroupTile* tiles, int tile_count, int row_tiles, int item) {
    const int per_chunk = kTilesTogether * row_tiles;
    const int first_tile = item / per_chunk * kTilesTogether;
    const int rest = item % per_chunk;
    const int together = min(kTilesTogether, tile_count - first_tile);
    const GroupTile tile = tiles[first_tile + rest % together];
    return Work{tile.expert, tile.first, tile.count, rest / together};
}

// Tokens that a tile is multiplied as: its routes rounded up to a width the kernels are built for. More widths would
// waste less, but with more of them in one kernel the compiler gives up on overlapping products.
__device__ __forceinline__ int tile_width(int count) { return count <= 16 ? 16 : count <= 64 ? 64 : 128; }

}  // namespace qmoe::prefill

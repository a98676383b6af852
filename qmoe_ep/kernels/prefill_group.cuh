// Routes grouped by expert for many routes: a counting sort in two kernels, each reading every route once.
//
// The order is that of group.cuh, by expert and then by route, whatever the blocks' timing.

#pragma once

#include "prefill_arguments.cuh"

namespace qmoe::prefill {

constexpr int kGroupThreads = 512;
constexpr int kMaxExperts = 2048;  // whose counters fit a block's static shared memory

struct SortArguments {
    const int* route_experts;  // [routes], -1 for a route that isn't computed
    int* chunk_counts;         // [chunks, experts]
    int* grouped_routes;       // [routes]
    GroupTile* tiles;
    int* tile_ends;            // [kClasses]
    int routes;
    int experts;
    int chunks;
    int chunk_routes;  // a multiple of kGroupThreads
    int tile_rows;
};

// A block owns a chunk of routes: it writes how many of them each expert has.
__device__ __forceinline__ void count_chunk(const SortArguments& a) {
    __shared__ int counts[kMaxExperts];
    dependent_begin();
    for (int expert = threadIdx.x; expert < a.experts; expert += kGroupThreads) {
        counts[expert] = 0;
    }
    __syncthreads();
    const int first = blockIdx.x * a.chunk_routes;
    const int end = min(a.routes - first, a.chunk_routes);
    for (int i = threadIdx.x; i < end; i += kGroupThreads) {
        const int expert = a.route_experts[first + i];
        if (expert >= 0) {
            atomicAdd(&counts[expert], 1);
        }
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < a.experts; expert += kGroupThreads) {
        a.chunk_counts[static_cast<long long>(blockIdx.x) * a.experts + expert] = counts[expert];
    }
}

__device__ __forceinline__ int sum_up_to_lane(int value, int lane) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int more = __shfl_up_sync(kAllLanes, value, offset);
        value += lane >= offset ? more : 0;
    }
    return value;
}

// Where the next tile of each class is listed, the same in all lanes of the warp.
struct ClassCursors {
    int next[kClasses];

    // Of every class, the tiles that the warp's lanes end their experts with: one each where `count` is not 0.
    __device__ __forceinline__ void advance(int count) {
#pragma unroll
        for (int c = 0; c < kClasses; ++c) {
            next[c] += __popc(__ballot_sync(kAllLanes, count > 0 && tile_class(count) == c));
        }
    }
};

// By one warp: turn totals into where each expert's routes begin, and, in the first block, list the tiles: whole ones
// first, then the last ones of the experts, wide ones before narrow ones. Blocks take turns through the list, so each
// gets as many of every width as the others.
__device__ __forceinline__ void place_experts(const SortArguments& a, const int* totals, int* begins) {
    const int lane = threadIdx.x;
    int whole_tiles = 0;
    ClassCursors sizes{};
    for (int base = 0; base < a.experts; base += 32) {
        const int count = base + lane < a.experts ? totals[base + lane] : 0;
        whole_tiles += __shfl_sync(kAllLanes, sum_up_to_lane(count / a.tile_rows, lane), 31);
        sizes.advance(count % a.tile_rows);
    }
    ClassCursors cursors{};
    int listed = whole_tiles;
#pragma unroll
    for (int c = 0; c < kClasses; ++c) {
        cursors.next[c] = listed;
        listed += sizes.next[c];
    }
    int routes = 0, tiles = 0;
    for (int base = 0; base < a.experts; base += 32) {
        const int expert = base + lane;
        const int count = expert < a.experts ? totals[expert] : 0;
        const int whole = count / a.tile_rows, rest = count % a.tile_rows;
        const int count_sum = sum_up_to_lane(count, lane), whole_sum = sum_up_to_lane(whole, lane);
        const int first = routes + count_sum - count;
        if (expert < a.experts) {
            begins[expert] = first;
        }
        for (int tile = 0; blockIdx.x == 0 && tile < whole; ++tile) {
            a.tiles[tiles + whole_sum - whole + tile] =
                GroupTile{expert, first + tile * a.tile_rows, a.tile_rows, 0};
        }
#pragma unroll
        for (int c = 0; c < kClasses; ++c) {
            const bool own = rest > 0 && tile_class(rest) == c;
            const unsigned before = __ballot_sync(kAllLanes, own) & ((1u << lane) - 1u);
            if (blockIdx.x == 0 && own) {
                a.tiles[cursors.next[c] + __popc(before)] = GroupTile{expert, first + whole * a.tile_rows, rest, 0};
            }
        }
        cursors.advance(rest);
        routes += __shfl_sync(kAllLanes, count_sum, 31);
        tiles += __shfl_sync(kAllLanes, whole_sum, 31);
    }
    if (blockIdx.x == 0 && lane == 0) {
#pragma unroll
        for (int c = 0; c < kClasses; ++c) {
            a.tile_ends[c] = cursors.next[c];
        }
    }
}

// A block owns a chunk of routes: from all counts it finds where its routes of each expert begin, and puts them there
// in order. Warps take turns, so that the order is that of the routes.
__device__ __forceinline__ void sort_chunk(const SortArguments& a) {
    __shared__ int totals[kMaxExperts];
    __shared__ int cursors[kMaxExperts];
    __shared__ int begins[kMaxExperts];
    dependent_begin();
    for (int expert = threadIdx.x; expert < a.experts; expert += kGroupThreads) {
        totals[expert] = cursors[expert] = 0;
    }
    __syncthreads();
    const int chunk = blockIdx.x;
    for (int i = threadIdx.x; i < a.experts * a.chunks; i += kGroupThreads) {
        const int count = a.chunk_counts[i];
        if (count) {
            atomicAdd(&totals[i % a.experts], count);
            if (i < chunk * a.experts) {
                atomicAdd(&cursors[i % a.experts], count);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        place_experts(a, totals, begins);
    }
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = chunk * a.chunk_routes;
    const int end = min(first + a.chunk_routes, a.routes);
    for (int base = first; base < end; base += kGroupThreads) {
        const int route = base + static_cast<int>(threadIdx.x);
        const int expert = route < end ? a.route_experts[route] : -1;
        const unsigned same = __match_any_sync(kAllLanes, expert);
        const int leader = __ffs(same) - 1;
        int place = 0;
        for (int turn = 0; turn < kGroupThreads / 32; ++turn) {
            if (turn == warp && lane == leader && expert >= 0) {
                place = begins[expert] + cursors[expert];
                cursors[expert] += __popc(same);
            }
            __syncthreads();
        }
        place = __shfl_sync(kAllLanes, place, leader);
        if (expert >= 0) {
            a.grouped_routes[place + __popc(same & ((1u << lane) - 1u))] = route;
        }
    }
}

}  // namespace qmoe::prefill

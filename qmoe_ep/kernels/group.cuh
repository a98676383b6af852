// Routes grouped by expert, on the device: counts, offsets, a stable order and a list of tiles for a grouped product.
//
// Two kernels of one block per expert. Each scans all routes; that is E reads of a small array from the second-level
// cache, in return for no atomics and an order that depends on nothing but the routes.

#pragma once

#include "route.cuh"

namespace qmoe {

// Up to tile_rows consecutive entries of grouped_routes, all of one expert.
struct alignas(16) GroupTile {
    int expert;
    int first;
    int count;
    int unused;
};

struct GroupArguments {
    const int* route_experts;  // [routes], -1 for a route that isn't computed
    int* expert_counts;        // [experts]
    int* expert_offsets;       // [experts + 1], where an expert's routes begin in grouped_routes
    int* grouped_routes;       // [routes], by expert, then by route
    GroupTile* tiles;          // [at most routes / tile_rows + min(experts, routes)]
    int* tile_count;           // [1]
    int routes;
    int experts;
    int tile_rows;
};

// Sum over the block, the same in every thread; `scratch` holds one int per warp and is free again on return.
__device__ __forceinline__ int block_sum(int value, int* scratch) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(kAllLanes, value, offset);
    }
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = value;
    }
    __syncthreads();
    int sum = 0;
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) {
        sum += scratch[warp];
    }
    __syncthreads();
    return sum;
}

// A block owns experts blockIdx.x, + gridDim.x, …: it reads all routes and writes one count.
__device__ __forceinline__ void group_count(const GroupArguments& a) {
    __shared__ int scratch[32];
    for (int expert = blockIdx.x; expert < a.experts; expert += gridDim.x) {
        int count = 0;
        for (int route = threadIdx.x; route < a.routes; route += blockDim.x) {
            count += a.route_experts[route] == expert;
        }
        count = block_sum(count, scratch);
        if (threadIdx.x == 0) {
            a.expert_counts[expert] = count;
        }
    }
}

// Put the routes of one expert, in order, from `next` on. `scratch` holds one int per warp.
__device__ __forceinline__ void assign_routes(const GroupArguments& a, int expert, int next, int* scratch) {
    const int warp = threadIdx.x / 32;
    const unsigned below = (1u << (threadIdx.x % 32)) - 1u;
    for (int base = 0; base < a.routes; base += blockDim.x) {
        const int route = base + static_cast<int>(threadIdx.x);
        const bool mine = route < a.routes && a.route_experts[route] == expert;
        const unsigned ballot = __ballot_sync(kAllLanes, mine);
        if (threadIdx.x % 32 == 0) {
            scratch[warp] = __popc(ballot);
        }
        __syncthreads();
        int before = next;
        for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) {
            before += i < warp ? scratch[i] : 0;
            next += scratch[i];
        }
        if (mine) {
            a.grouped_routes[before + __popc(ballot & below)] = route;
        }
        __syncthreads();
    }
}

// A block owns experts blockIdx.x, + gridDim.x, …: it adds up the counts below its expert, writes the expert's offset
// and tiles, and puts its routes in order. The block of the last expert also writes the totals.
__device__ __forceinline__ void group_assign(const GroupArguments& a) {
    __shared__ int scratch[32];
    for (int expert = blockIdx.x; expert < a.experts; expert += gridDim.x) {
        int routes_below = 0;
        int tiles_below = 0;
        for (int other = threadIdx.x; other < expert; other += blockDim.x) {
            const int count = a.expert_counts[other];
            routes_below += count;
            tiles_below += (count + a.tile_rows - 1) / a.tile_rows;
        }
        const int first = block_sum(routes_below, scratch);
        const int first_tile = block_sum(tiles_below, scratch);
        const int count = a.expert_counts[expert];
        const int tiles = (count + a.tile_rows - 1) / a.tile_rows;
        for (int tile = threadIdx.x; tile < tiles; tile += blockDim.x) {
            const int done = tile * a.tile_rows;
            a.tiles[first_tile + tile] = GroupTile{expert, first + done, min(count - done, a.tile_rows), 0};
        }
        if (threadIdx.x == 0) {
            a.expert_offsets[expert] = first;
            if (expert == a.experts - 1) {
                a.expert_offsets[a.experts] = first + count;
                a.tile_count[0] = first_tile + tiles;
            }
        }
        if (count > 0) {
            assign_routes(a, expert, first, scratch);
        }
    }
}

}  // namespace qmoe

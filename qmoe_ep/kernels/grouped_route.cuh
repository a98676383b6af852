// Routing and grouping of a few rows in one block.

#pragma once

#include "decode_instructions.cuh"
#include "decode_route.cuh"
#include "group.cuh"

namespace qmoe::grouped {

struct RouteArguments {
    const void* router_probs;
    const void* router_weights;
    const int* valid_rows;
    void* telemetry;
    int* route_experts;     // [routes], -1 for a route that isn't computed
    float* route_weights;   // [routes]
    int* grouped_routes;    // [routes], by expert, then by route
    GroupTile* tiles;       // [at most routes / tile_routes + min(experts, routes)]
    int* tile_count;        // [1]
    int rows;
    int experts;
    int top_k;
    int tile_routes;
};

// Inclusive sums over the lanes of a warp.
__device__ __forceinline__ int sum_below(int value, int lane) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_sync(kAllLanes, value, (lane - offset) & 31);
        value += lane >= offset ? other : 0;
    }
    return value;
}

// Sums of two values over the threads below this one, and over all of the block. `scratch` holds two ints per warp and
// is free again on return.
struct Below {
    int routes;
    int tiles;
    int all_routes;
    int all_tiles;
};

__device__ __forceinline__ Below sums_below(int routes, int tiles, int* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int routes_through = sum_below(routes, lane), tiles_through = sum_below(tiles, lane);
    if (lane == 31) {
        scratch[2 * warp] = routes_through;
        scratch[2 * warp + 1] = tiles_through;
    }
    __syncthreads();
    Below result{routes_through - routes, tiles_through - tiles, 0, 0};
    for (int i = 0; i < warps; ++i) {
        result.routes += i < warp ? scratch[2 * i] : 0;
        result.tiles += i < warp ? scratch[2 * i + 1] : 0;
        result.all_routes += scratch[2 * i];
        result.all_tiles += scratch[2 * i + 1];
    }
    __syncthreads();
    return result;
}

// The only block: a warp selects and weighs the experts of a row; then, for every expert, a mask of its routes is made in
// shared memory, from which a thread counts them and lists tiles of up to tile_routes, and by which every route finds
// its place. Reads the logits; writes experts, weights, and the routes sorted by expert. Latency bounds it.
template <class Logit, class Weight, bool normalize, int Keys>
__device__ __forceinline__ void route_and_group(const RouteArguments& a) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int routes = a.rows * a.top_k, words = (routes + 31) / 32;
    int* scratch = reinterpret_cast<int*>(decode::shared_memory());
    int* chosen = scratch + 64;                                           // [routes]
    int* starts = chosen + routes;                                        // [experts]
    unsigned* masks = reinterpret_cast<unsigned*>(starts + a.experts);    // [experts, words]

    decode::wait_for_predecessor();
    decode::allow_successor();
    for (int i = threadIdx.x; i < a.experts * words; i += blockDim.x) {
        masks[i] = 0;
    }
    const int valid = max(0, a.valid_rows ? min(*a.valid_rows, a.rows) : a.rows);
    RouteRecord* record = open_record(a.telemetry, a.experts, a.top_k);
    for (int row = warp; row < a.rows; row += warps) {
        int* selected = chosen + row * a.top_k;
        float* weights = a.route_weights + row * a.top_k;
        if (row >= valid) {
            for (int slot = lane; slot < a.top_k; slot += 32) {
                selected[slot] = -1;
                weights[slot] = 0.0f;
            }
        } else {
            const Logit* logits = static_cast<const Logit*>(a.router_probs) + static_cast<long long>(row) * a.experts;
            const void* given = nullptr;
            if constexpr (!kIsVoid<Weight>) {
                given = static_cast<const Weight*>(a.router_weights) + static_cast<long long>(row) * a.experts;
            }
            decode::select_by_warp<Keys>(logits, a.experts, a.top_k, lane, selected);
            __syncwarp();
            if (record) {
                record_choice(record, row, valid, logits, selected, lane);
            }
            weigh_experts<Logit, Weight, normalize>(logits, given, a.experts, a.top_k, lane, selected, weights);
        }
        __syncwarp();
        for (int slot = lane; slot < a.top_k; slot += 32) {
            a.route_experts[row * a.top_k + slot] = selected[slot];
        }
    }
    __syncthreads();
    if (record && threadIdx.x == 0) {
        finish_record(record, valid, 1);
    }

    for (int route = threadIdx.x; route < routes; route += blockDim.x) {
        if (chosen[route] >= 0) {
            atomicOr(masks + chosen[route] * words + route / 32, 1u << route % 32);
        }
    }
    __syncthreads();
    int routes_done = 0, tiles_done = 0;
    for (int base = 0; base < a.experts; base += blockDim.x) {
        const int expert = base + static_cast<int>(threadIdx.x);
        int count = 0;
        if (expert < a.experts) {
            for (int i = 0; i < words; ++i) {
                count += __popc(masks[expert * words + i]);
            }
        }
        const int tiles = (count + a.tile_routes - 1) / a.tile_routes;
        const Below below = sums_below(count, tiles, scratch);
        const int first = routes_done + below.routes;
        for (int tile = 0; tile < tiles; ++tile) {
            const int done = tile * a.tile_routes;
            a.tiles[tiles_done + below.tiles + tile] =
                GroupTile{expert, first + done, min(count - done, a.tile_routes), 0};
        }
        if (expert < a.experts) {
            starts[expert] = first;
        }
        routes_done += below.all_routes;
        tiles_done += below.all_tiles;
    }
    if (threadIdx.x == 0) {
        a.tile_count[0] = tiles_done;
    }
    __syncthreads();
    for (int route = threadIdx.x; route < routes; route += blockDim.x) {
        const int expert = chosen[route];
        if (expert >= 0) {
            const unsigned* mask = masks + expert * words;
            int place = starts[expert] + __popc(mask[route / 32] & ((1u << route % 32) - 1u));
            for (int i = 0; i < route / 32; ++i) {
                place += __popc(mask[i]);
            }
            a.grouped_routes[place] = route;
        }
    }
}

}  // namespace qmoe::grouped

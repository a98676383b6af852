// Portable kernels for many rows: a tiled product over the routes of one expert at a time, then the combination.
//
// A block multiplies up to 16 * RoutesPerThread routes with 128 weight rows, 32 inner elements a step. Weights are
// decoded once per step into shared memory as floats and serve all routes of the tile. Blocks take tiles from a list
// on the device until it is exhausted, so that nothing about the grouping has to be known when they are launched.
// Bound by float multiply-adds, with few routes per expert by the decoding.

#pragma once

#include "portable_arguments.cuh"

namespace qmoe::portable {

constexpr int kManyThreads = 256;
constexpr int kTileRows = 128;   // weight rows of a tile
constexpr int kTileInner = 32;   // two chunks
constexpr int kHalfRows = kTileRows / 2;
constexpr int kColumns = 8;      // weight rows per thread: 4 t .. 4 t + 3 of each half

template <int RoutesPerThread>
struct TileShared {
    alignas(16) float weights[kTileInner][kTileRows];
    alignas(16) float values[kTileInner][16 * RoutesPerThread];
};

// Where thread t's column c lies in the tile.
__device__ __forceinline__ int tile_column(int c) {
    return static_cast<int>(threadIdx.x) % 16 * 4 + (c < 4 ? c : kHalfRows + c - 4);
}

// Decode this thread's chunk of the step into shared memory; past the end of the row nothing counts.
template <class F>
__device__ __forceinline__ void store_chunk(float (*weights)[kTileRows], const Chunk<F::kBits>& chunk, int present) {
    const int column = threadIdx.x % kTileRows;
    const int first = static_cast<int>(threadIdx.x) / kTileRows * kChunkCodes;
#pragma unroll
    for (int j = 0; j < kChunkCodes; ++j) {
        weights[first + j][column] = j < present ? chunk_value<F>(chunk, j) : 0.0f;
    }
}

// Multiply the tile's routes, of which `vector` is the one that this thread loads (null if there is none), with the
// tile's weight rows, of which `row` is the one that this thread loads: of format First in the lower half of the tile,
// Second in the upper half. Partial sums of 32 products join the result.
template <class First, class Second, int LoadBytes, int RoutesPerThread, class T>
__device__ __forceinline__ void multiply_tile(TileShared<RoutesPerThread>& shared, const T* vector,
                                              const MatrixRow& row, int in_features,
                                              float (&result)[RoutesPerThread][kColumns]) {
    constexpr int kValues = 2 * RoutesPerThread;  // that a thread loads per step
    constexpr int kRoutes = 16 * RoutesPerThread;
    constexpr int kWidth = LoadBytes < kValues * static_cast<int>(sizeof(T)) ? LoadBytes : kValues * sizeof(T);
    const bool lower = threadIdx.x % kTileRows < kHalfRows;
    const int own_chunk = threadIdx.x / kTileRows;
    const int own_value = static_cast<int>(threadIdx.x) / kRoutes * kValues;
    for (int step = 0; step < in_features; step += kTileInner) {
        const int chunk_present = in_features - step - own_chunk * kChunkCodes;
        const int index = step / kChunkCodes + own_chunk;
        if constexpr (kSameType<First, Second>) {
            Chunk<First::kBits> chunk{};
            if (chunk_present > 0) {
                chunk = load_chunk<First>(row, index, in_features);
            }
            store_chunk<First>(shared.weights, chunk, chunk_present);
        } else if (lower) {
            Chunk<First::kBits> chunk{};
            if (chunk_present > 0) {
                chunk = load_chunk<First>(row, index, in_features);
            }
            store_chunk<First>(shared.weights, chunk, chunk_present);
        } else {
            Chunk<Second::kBits> chunk{};
            if (chunk_present > 0) {
                chunk = load_chunk<Second>(row, index, in_features);
            }
            store_chunk<Second>(shared.weights, chunk, chunk_present);
        }
        float values[kValues];
        const int left = vector ? in_features - step - own_value : 0;
        if (left >= kValues) {
            load_values<kValues, kWidth>(vector + step + own_value, values);
        } else {
            load_values_guarded<kValues>(vector + step + own_value, left, values);
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            shared.values[own_value + i][threadIdx.x % kRoutes] = values[i];
        }
        __syncthreads();
        float partial[RoutesPerThread][kColumns] = {};
#pragma unroll 8
        for (int k = 0; k < kTileInner; ++k) {
            float w[kColumns];
            float x[RoutesPerThread];
            load_values<4, 16>(&shared.weights[k][threadIdx.x % 16 * 4], reinterpret_cast<float(&)[4]>(w[0]));
            load_values<4, 16>(&shared.weights[k][kHalfRows + threadIdx.x % 16 * 4],
                               reinterpret_cast<float(&)[4]>(w[4]));
            load_values<RoutesPerThread, 4 * RoutesPerThread>(&shared.values[k][threadIdx.x / 16 * RoutesPerThread], x);
#pragma unroll
            for (int m = 0; m < RoutesPerThread; ++m) {
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    partial[m][c] = fmaf(w[c], x[m], partial[m][c]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < RoutesPerThread; ++m) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                result[m][c] += partial[m][c];
            }
        }
        __syncthreads();
    }
}

// The route of this thread's entry `m` of a tile, or -1.
__device__ __forceinline__ int tile_route(const int* grouped_routes, const GroupTile& tile, int m) {
    return m < tile.count ? grouped_routes[tile.first + m] : -1;
}

// A block takes (tile of routes, tile of features) pairs: 64 features where gate and up are both needed, the lower
// half of its weight rows being gate and the upper half up, else 128. It reads the routes' inputs and the expert's
// rows, and writes the activated features.
template <class L, int RoutesPerThread>
__device__ __forceinline__ void gate_up_many(const GateUpArguments& a) {
    __shared__ TileShared<RoutesPerThread> shared;
    constexpr int kFeatures = L::kGated ? kHalfRows : kTileRows;
    const int feature_tiles = (a.inter + kFeatures - 1) / kFeatures;
    const long long items = static_cast<long long>(*a.tile_count) * feature_tiles;
    const Matrix fc1 = fc1_matrix(a, L::kFused);
    const Matrix third = L::kFused ? fc1 : fc3_matrix(a);
    const int loaded = threadIdx.x % kTileRows;
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const GroupTile tile = a.tiles[item / feature_tiles];
        const int first = static_cast<int>(item % feature_tiles) * kFeatures;
        const int feature = min(first + loaded % kFeatures, a.inter - 1);
        MatrixRow row;
        if (!L::kGated || loaded < kHalfRows) {
            row = matrix_row<typename L::Gate>(fc1, tile.expert, gate_row<L::kGating>(feature));
        } else {
            row = matrix_row<typename L::Up>(third, tile.expert, up_row<L::kGating>(feature, a.inter));
        }
        const int own = tile_route(a.grouped_routes, tile, threadIdx.x % (16 * RoutesPerThread));
        const auto* input = static_cast<const typename L::Input*>(a.input);
        const auto* vector = own < 0 ? nullptr : input + static_cast<long long>(own / a.top_k) * a.hidden;
        float result[RoutesPerThread][kColumns] = {};
        multiply_tile<typename L::Gate, typename L::Up, L::kInputBytes>(shared, vector, row, a.hidden, result);
#pragma unroll
        for (int c = 0; c < (L::kGated ? 4 : kColumns); ++c) {
            const int column = first + tile_column(c);
            if (column >= a.inter) {
                continue;
            }
            const float bias = load_bias<typename L::Gate>(fc1, tile.expert, gate_row<L::kGating>(column));
            float up_bias = 0.0f;
            if constexpr (L::kGated) {
                up_bias = load_bias<typename L::Up>(third, tile.expert, up_row<L::kGating>(column, a.inter));
            }
#pragma unroll
            for (int m = 0; m < RoutesPerThread; ++m) {
                const int route = tile_route(a.grouped_routes, tile, threadIdx.x / 16 * RoutesPerThread + m);
                if (route < 0) {
                    continue;
                }
                float value = result[m][c] + bias;
                if constexpr (L::kGated) {
                    value = activate_gated_as<L::kActivation>(value, result[m][c + 4] + up_bias, a.scalars);
                } else {
                    value = activate<L::kActivation>(value);
                }
                a.activated[static_cast<long long>(route) * a.activated_stride + column] = value;
            }
        }
    }
}

// A block takes (tile of routes, tile of 128 features) pairs: it reads the routes' activated features and the
// expert's rows, and writes FC2 with bias, one float per route and feature.
template <class F, int RoutesPerThread>
__device__ __forceinline__ void down_many(const DownArguments& a) {
    __shared__ TileShared<RoutesPerThread> shared;
    const int feature_tiles = (a.hidden + kTileRows - 1) / kTileRows;
    const long long items = static_cast<long long>(*a.tile_count) * feature_tiles;
    const Matrix fc2 = fc2_matrix(a);
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const GroupTile tile = a.tiles[item / feature_tiles];
        const int first = static_cast<int>(item % feature_tiles) * kTileRows;
        const int loaded = first + static_cast<int>(threadIdx.x) % kTileRows;
        const MatrixRow row = matrix_row<F>(fc2, tile.expert, min(loaded, a.hidden - 1));
        const int own = tile_route(a.grouped_routes, tile, threadIdx.x % (16 * RoutesPerThread));
        const float* vector = own < 0 ? nullptr : a.activated + static_cast<long long>(own) * a.activated_stride;
        float result[RoutesPerThread][kColumns] = {};
        multiply_tile<F, F, kActivatedBytes>(shared, vector, row, a.inter, result);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const int feature = first + tile_column(c);
            if (feature >= a.hidden) {
                continue;
            }
            const float bias = load_bias<F>(fc2, tile.expert, feature);
#pragma unroll
            for (int m = 0; m < RoutesPerThread; ++m) {
                const int route = tile_route(a.grouped_routes, tile, threadIdx.x / 16 * RoutesPerThread + m);
                if (route >= 0) {
                    a.contributions[static_cast<long long>(route) * a.hidden + feature] = result[m][c] + bias;
                }
            }
        }
    }
}

// A block owns 256 features of a row: it reads the row's contributions and weights, sums them in slot order, and
// writes the output, rounded once. Rows without experts are left as they are. Bound by the reading.
template <class Output>
__device__ __forceinline__ void combine(const CombineArguments& a) {
    const int tiles = (a.hidden + kManyThreads - 1) / kManyThreads;
    const long long items = static_cast<long long>(a.rows) * tiles;
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const long long row = item / tiles;
        const int feature = static_cast<int>(item % tiles) * kManyThreads + static_cast<int>(threadIdx.x);
        const long long first = row * a.top_k;
        if (feature >= a.hidden || a.route_experts[first] < 0) {
            continue;
        }
        float total = 0.0f;
        for (int slot = 0; slot < a.top_k; ++slot) {
            total = fmaf(a.route_weights[first + slot], a.contributions[(first + slot) * a.hidden + feature], total);
        }
        static_cast<Output*>(a.output)[row * a.hidden + feature] = from_float<Output>(total);
    }
}

}  // namespace qmoe::portable

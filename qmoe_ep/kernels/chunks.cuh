// Valid rows of each chunk of a call that is computed in several.

#pragma once

namespace qmoe {

constexpr int kChunkThreads = 128;

struct ChunkArguments {
    const int* valid_rows;  // [1], null for all
    int* chunk_rows;        // [chunks]
    int rows;
    int rows_each;  // of a chunk, the last one may have fewer
    int chunks;
};

// The only block owns all chunks: it reads the call's valid rows and writes those of every chunk.
__device__ __forceinline__ void count_chunk_rows(const ChunkArguments& a) {
    const int valid = a.valid_rows ? min(*a.valid_rows, a.rows) : a.rows;
    for (int chunk = threadIdx.x; chunk < a.chunks; chunk += kChunkThreads) {
        a.chunk_rows[chunk] = min(max(valid - chunk * a.rows_each, 0), a.rows_each);
    }
}

}  // namespace qmoe

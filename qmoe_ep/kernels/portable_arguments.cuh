// Argument structs of the portable kernels, shared by the forms for few and for many rows.

#pragma once

#include "activation.cuh"
#include "group.cuh"
#include "quantization.cuh"

namespace qmoe::portable {

// FC1 (and FC3) with bias and activation: input [rows, hidden] to activated float [routes, activated_stride].
struct GateUpArguments {
    const void* input;
    const unsigned char* fc1_weights;
    const void* fc1_scales;
    const void* fc1_bias;
    const unsigned char* fc1_zero_points;
    const unsigned char* fc3_weights;
    const void* fc3_scales;
    const void* fc3_bias;
    const unsigned char* fc3_zero_points;
    const float* global_scales;  // of both
    const int* route_experts;   // few rows: [routes]
    const int* grouped_routes;  // many rows, as are the next two: see GroupArguments
    const GroupTile* tiles;
    const int* tile_count;
    float* activated;
    int routes;
    int top_k;
    int hidden;
    int inter;
    int activated_stride;
    GateScalars scalars;
};

// FC2 with bias. Few rows: activated to output [rows, hidden], the slots of a row summed in order. Many rows:
// activated to contributions float [routes, hidden].
struct DownArguments {
    const float* activated;
    const unsigned char* fc2_weights;
    const void* fc2_scales;
    const void* fc2_bias;
    const unsigned char* fc2_zero_points;
    const float* global_scales;
    const int* route_experts;  // few rows, as are the next two and slots_at_once
    const float* route_weights;
    void* output;
    const int* grouped_routes;  // many rows, as are the next three
    const GroupTile* tiles;
    const int* tile_count;
    float* contributions;
    int rows;
    int top_k;
    int hidden;
    int inter;
    int activated_stride;
    int slots_at_once;
};

// Contributions to output [rows, hidden].
struct CombineArguments {
    const float* contributions;
    const int* route_experts;
    const float* route_weights;
    void* output;
    int rows;
    int top_k;
    int hidden;
};

__device__ __forceinline__ Matrix fc1_matrix(const GateUpArguments& a, bool fused) {
    return Matrix{a.fc1_weights, a.fc1_scales, a.fc1_bias, a.fc1_zero_points, fused ? 2 * a.inter : a.inter, a.hidden,
                  a.global_scales};
}

__device__ __forceinline__ Matrix fc3_matrix(const GateUpArguments& a) {
    return Matrix{a.fc3_weights, a.fc3_scales, a.fc3_bias, a.fc3_zero_points, a.inter, a.hidden, a.global_scales};
}

__device__ __forceinline__ Matrix fc2_matrix(const DownArguments& a) {
    return Matrix{a.fc2_weights, a.fc2_scales, a.fc2_bias, a.fc2_zero_points, a.hidden, a.inter, a.global_scales};
}

// The row of FC1 that holds the gate, or only, half of an intermediate feature.
template <Gating gating>
__device__ __forceinline__ int gate_row(int feature) {
    return gating == Gating::kInterleaved ? 2 * feature : feature;
}

// The row of FC1 or FC3 that holds its up half.
template <Gating gating>
__device__ __forceinline__ int up_row(int feature, int inter) {
    return gating == Gating::kInterleaved ? 2 * feature + 1 : gating == Gating::kHalves ? inter + feature : feature;
}

// The compile-time side of FC1: the input's type and load width, the formats of the gate and the up matrix (the same
// where they are fused), and the activation.
template <class InputType, int InputBytes, class GateFormat, class UpFormat, Gating kind, Activation function>
struct GateUp {
    using Input = InputType;
    using Gate = GateFormat;
    using Up = UpFormat;
    static constexpr int kInputBytes = InputBytes;
    static constexpr Gating kGating = kind;
    static constexpr bool kGated = kind != Gating::kNone;
    static constexpr bool kFused = kind == Gating::kInterleaved || kind == Gating::kHalves;
    static constexpr Activation kActivation = function;
};

constexpr int kActivatedBytes = 16;  // rows of `activated` are padded to this

}  // namespace qmoe::portable

// Activations of the expert, in float, accurate in the tails and transparent to NaN.
//
// Minima and maxima are comparisons, because fminf and fmaxf swallow a NaN.

#pragma once

#include "float_types.cuh"

namespace qmoe {

// kGeglu is gated; kSiluLimited is gated with the limit after the activation.
enum class Activation { kRelu, kGelu, kSilu, kIdentity, kRelu2, kGeglu, kSiluLimited };

// Where the up half of a gated activation comes from: nowhere, odd rows of FC1, its second half, or FC3.
enum class Gating { kNone, kInterleaved, kHalves, kThird };

// Scalars of the gated activation; without a limit it is +infinity, which limits nothing.
struct GateScalars {
    float alpha;
    float beta;
    float limit;
};

// 1 / (1 + exp(-x)) from exp(-|x|), which never overflows and keeps the lower tail's relative accuracy.
__device__ __forceinline__ float sigmoid(float x) {
    const float tail = expf(-fabsf(x));
    return (x < 0.0f ? tail : 1.0f) / (1.0f + tail);
}

// x * sigmoid(2u) with u = sqrt(2/pi) * (x + 0.044715 x^3): equal to the tanh form, 0.5 x (1 + tanh(u)), without
// the cancellation of 1 + tanh(u) for negative u.
__device__ __forceinline__ float gelu(float x) {
    constexpr float kTwice = 1.5957691216057308f;  // 2 sqrt(2/pi)
    constexpr float kCubic = 0.07135481627159701f;  // 2 sqrt(2/pi) 0.044715
    return x * sigmoid(x * fmaf(kCubic, x * x, kTwice));
}

template <Activation kind>
__device__ __forceinline__ float activate(float x) {
    if constexpr (kind == Activation::kRelu) {
        return x < 0.0f ? 0.0f : x;
    } else if constexpr (kind == Activation::kGelu) {
        return gelu(x);
    } else if constexpr (kind == Activation::kSilu) {
        return x * sigmoid(x);
    } else if constexpr (kind == Activation::kRelu2) {
        return x < 0.0f ? 0.0f : x * x;
    } else {
        return x;
    }
}

// gate' sigmoid(alpha gate') (up' + beta) with gate' = min(gate, limit) and up' = clamp(up, -limit, limit).
__device__ __forceinline__ float activate_gated(float gate, float up, const GateScalars& scalars) {
    gate = gate > scalars.limit ? scalars.limit : gate;
    up = up > scalars.limit ? scalars.limit : up;
    up = up < -scalars.limit ? -scalars.limit : up;
    return gate * sigmoid(scalars.alpha * gate) * (up + scalars.beta);
}

// The same for any gated activation: min(gate sigmoid(alpha gate), limit) (up' + beta), or gelu(gate) up.
template <Activation kind>
__device__ __forceinline__ float activate_gated_as(float gate, float up, const GateScalars& scalars) {
    if constexpr (kind == Activation::kGeglu) {
        return gelu(gate) * up;
    } else if constexpr (kind == Activation::kSiluLimited) {
        float activated = gate * sigmoid(scalars.alpha * gate);
        activated = activated > scalars.limit ? scalars.limit : activated;
        up = up > scalars.limit ? scalars.limit : up;
        up = up < -scalars.limit ? -scalars.limit : up;
        return activated * (up + scalars.beta);
    } else {
        return activate_gated(gate, up, scalars);
    }
}

}  // namespace qmoe

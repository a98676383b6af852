// Arithmetic on pairs of halves, for the CPU: computed in double and rounded once.

#pragma once

#include "float_types.cuh"

namespace qmoe {

// Round a double to a half without rounding to float first.
inline unsigned short round_half(Float16, double value) {
    return std::bit_cast<unsigned short>(static_cast<_Float16>(value));
}
inline unsigned short round_half(BFloat16, double value) {
    float near = static_cast<float>(value);
    if (std::isfinite(near) && static_cast<double>(near) != value) {
        // Round to odd, so that the second rounding sees on which side of a tie the value lies.
        const unsigned bits = std::bit_cast<unsigned>(near);
        const bool beyond = std::fabs(static_cast<double>(near)) > std::fabs(value);
        near = std::bit_cast<float>((beyond ? bits - 1 : bits) | 1u);
    }
    return from_float<BFloat16>(near).bits;
}

template <class Half>
struct PairMath {
    static constexpr unsigned kBias = kSameType<Half, Float16> ? 15 : 127;
    static constexpr unsigned kMantissa = kSameType<Half, Float16> ? 10 : 7;
    static double low(unsigned pair) { return to_float(Half{static_cast<unsigned short>(pair)}); }
    static double high(unsigned pair) { return to_float(Half{static_cast<unsigned short>(pair >> 16)}); }
    static unsigned both(double low, double high) {
        return round_half(Half{}, low) | static_cast<unsigned>(round_half(Half{}, high)) << 16;
    }
    static unsigned add(unsigned a, unsigned b) { return both(low(a) + low(b), high(a) + high(b)); }
    static unsigned mul(unsigned a, unsigned b) { return both(low(a) * low(b), high(a) * high(b)); }
    static unsigned fma(unsigned a, unsigned b, unsigned c) {
        return both(low(a) * low(b) + low(c), high(a) * high(b) + high(c));
    }
    static unsigned pack(float low, float high) {
        return from_float<Half>(low).bits | static_cast<unsigned>(from_float<Half>(high).bits) << 16;
    }
};

inline float fast_sigmoid(float x) { return 1.0f / (1.0f + std::exp2(x * -1.4426950408889634f)); }

}  // namespace qmoe

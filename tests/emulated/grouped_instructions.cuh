// Host versions of the functions of the kernels' grouped_instructions.cuh, for cuda_on_host.h.

#pragma once

#include "decode_instructions.cuh"
#include "float_types.cuh"

struct alignas(16) int4 {
    int x, y, z, w;
};

namespace qmoe::grouped {

inline double bfloat_at(unsigned word, int index) {
    return __uint_as_float((index ? word >> 16 : word & 0xffffu) << 16);
}

inline void multiply_accumulate_bfloats(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                        unsigned b1) {
    decode::multiply_fragments(c, {{a0, a1, a2, a3}, {b0, b1}}, bfloat_at);
}

inline unsigned round_to_bfloats(float first, float second) {
    return from_float<BFloat16>(first).bits | static_cast<unsigned>(from_float<BFloat16>(second).bits) << 16;
}

inline unsigned fma_bfloats(unsigned a, unsigned b, unsigned c) {
    const auto at = [&](int i) { return static_cast<float>(bfloat_at(a, i) * bfloat_at(b, i) + bfloat_at(c, i)); };
    return round_to_bfloats(at(0), at(1));
}

inline int4 load_fresh(const int4* source) { return *source; }
inline int load_fresh(const int* source) { return *source; }

}  // namespace qmoe::grouped

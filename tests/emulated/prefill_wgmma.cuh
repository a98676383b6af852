// The products of a warpgroup, for the CPU: each warp computes its 16 rows at once.

#pragma once

#include "prefill_pipeline.cuh"

namespace qmoe {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int Pending>
inline void wgmma_wait() {}
inline void pin(float&) {}

// Only the address is kept of what the descriptor says.
inline unsigned long long token_descriptor(unsigned shared_address) { return shared_address >> 4; }

template <class Half, int Tokens>
struct TensorProduct {
    static void run(float* d, const unsigned* a, unsigned long long tokens) {
        unsigned quad[4][4];
        for (int i = 0; i < 2; ++i) {
            const unsigned long long own = a[2 * i] | static_cast<unsigned long long>(a[2 * i + 1]) << 32;
            emulation::exchange(own, "wgmma", [&](auto of) {
                for (unsigned c = 0; c < 4; ++c) {
                    const unsigned long long pair = of(threadIdx.x % 32 / 4 * 4 + c);
                    quad[c][2 * i] = static_cast<unsigned>(pair);
                    quad[c][2 * i + 1] = static_cast<unsigned>(pair >> 32);
                }
                return 0ull;
            });
        }
        float rows[2][16];
        for (int c = 0; c < 4; ++c) {
            for (int i = 0; i < 4; ++i) {
                for (int e = 0; e < 2; ++e) {
                    const Half half{static_cast<unsigned short>(quad[c][i] >> (16 * e))};
                    rows[i % 2][i / 2 * 8 + 2 * c + e] = to_float(half);
                }
            }
        }
        for (int j = 0; j < Tokens / 8; ++j) {
            for (int i = 0; i < 4; ++i) {
                const unsigned token = 8 * j + 2 * (threadIdx.x % 4) + i % 2;
                float sum = d[4 * j + i];
                for (unsigned k = 0; k < 16; ++k) {
                    // The swizzle works on address bits, of which the descriptor's lower ones move along the row.
                    const unsigned line = static_cast<unsigned>(tokens << 4) + token * 128 + k * 2;
                    const unsigned address = line ^ (line >> 7 & 7) << 4;
                    sum += rows[i / 2][k] * to_float(emulation::shared_value<Half>(address));
                }
                d[4 * j + i] = sum;
            }
        }
    }
};

}  // namespace qmoe

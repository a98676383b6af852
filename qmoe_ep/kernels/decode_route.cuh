// Selection of a row's experts by one warp, with the logits in registers.

#pragma once

#include "route.cuh"

namespace qmoe::decode {

// Ranks in one word where the logit has 16 bits: its order, then the complement of the index; distinct and never 0.
// A row of more than Keys * 32 experts goes through select_experts, which reads the logits again in every round.
template <int Keys, class T>
__device__ __forceinline__ void select_in_registers(const T* logits, int experts, int top_k, int lane, int* selected) {
    if constexpr (sizeof(T) == 2) {
        unsigned rank[Keys];
#pragma unroll
        for (int i = 0; i < Keys; ++i) {
            const int expert = lane + 32 * i;
            rank[i] = expert < experts ? order_key(logits[expert]) << 16 | (0xffffu - expert) : 0u;
        }
        for (int slot = 0; slot < top_k; ++slot) {
            unsigned own = rank[0];
#pragma unroll
            for (int i = 1; i < Keys; ++i) {
                own = max(own, rank[i]);
            }
            const unsigned best = warp_max(own);
            if (lane == slot % 32) {
                selected[slot] = 0xffff - static_cast<int>(best & 0xffffu);
            }
#pragma unroll
            for (int i = 0; i < Keys; ++i) {
                rank[i] = rank[i] == best ? 0u : rank[i];
            }
        }
    } else {
        unsigned key[Keys];
        unsigned left = 0;  // bit i: key[i] is there and not yet taken
#pragma unroll
        for (int i = 0; i < Keys; ++i) {
            const int expert = lane + 32 * i;
            key[i] = expert < experts ? order_key(logits[expert]) : 0u;
            left |= expert < experts ? 1u << i : 0u;
        }
        for (int slot = 0; slot < top_k; ++slot) {
            unsigned own = 0;
            int place = Keys;
#pragma unroll
            for (int i = Keys - 1; i >= 0; --i) {
                const bool better = (left >> i & 1u) && (key[i] >= own || place == Keys);
                own = better ? key[i] : own;
                place = better ? i : place;
            }
            const unsigned best = warp_max(own);
            const unsigned index = place < Keys && own == best ? lane + 32 * place : 0x7fffffffu;
            const unsigned expert = ~warp_max(~index);
            if (lane == slot % 32) {
                selected[slot] = static_cast<int>(expert);
            }
            if (index == expert) {
                left &= ~(1u << place);
            }
        }
    }
}

template <int Keys, class T>
__device__ __forceinline__ void select_by_warp(const T* logits, int experts, int top_k, int lane, int* selected) {
    if constexpr (Keys > 0) {
        select_in_registers<Keys>(logits, experts, top_k, lane, selected);
    } else {
        select_experts(logits, experts, top_k, lane, selected);
    }
}

}  // namespace qmoe::decode

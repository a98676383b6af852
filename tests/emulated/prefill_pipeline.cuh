// Barriers, copies and shared memory by address, for the CPU: copies arrive when they are waited for, waits let other threads run.

#pragma once

#include <deque>
#include <map>

#include "float_types.cuh"

struct alignas(16) float4 {
    float x, y, z, w;
};

inline int __ffs(unsigned value) { return value ? std::countr_zero(value) + 1 : 0; }
inline float4 __ldcs(const float4* address) { return *address; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
    const unsigned long long bytes = a | static_cast<unsigned long long>(b) << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= static_cast<unsigned>(bytes >> (8 * (select >> (4 * i) & 7)) & 0xff) << (8 * i);
    }
    return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((low | static_cast<unsigned long long>(high) << 32) >> (shift & 31));
}
inline int atomicAdd(int* address, int value) {
    const int old = *address;
    *address += value;
    return old;
}
inline unsigned __match_any_sync(unsigned, int value) {
    return emulation::exchange(static_cast<unsigned>(value), "match_any", [=](auto of) {
        unsigned mask = 0;
        for (unsigned lane = 0; lane < 32; ++lane) {
            mask |= static_cast<unsigned>(of(lane) == static_cast<unsigned>(value)) << lane;
        }
        return mask;
    });
}
inline int __shfl_up_sync(unsigned, int value, int offset) {
    const int lane = threadIdx.x % 32;
    return emulation::exchange(value, "shfl_up", [=](auto of) { return of(lane < offset ? lane : lane - offset); });
}
inline bool __any_sync(unsigned mask, unsigned value) { return __ballot_sync(mask, value != 0) != 0; }

namespace emulation {

constexpr unsigned kSharedBytes = 227 << 10;
alignas(1024) inline unsigned char shared_memory[kSharedBytes];

struct Barrier {
    unsigned arrivals, missing, phase;
};
inline std::map<unsigned, Barrier> barriers;

inline unsigned char* shared_place(unsigned address, unsigned bytes) {
    if (address % bytes || address + bytes > kSharedBytes) {
        fail("a shared-memory access is misaligned or out of range");
    }
    return shared_memory + address;
}

template <class T>
inline T shared_value(unsigned address) {
    T value;
    std::memcpy(&value, shared_place(address, sizeof(T)), sizeof(T));
    return value;
}

// An asynchronous copy arrives when its thread waits for its group; until then its destination is poisoned.
struct Copy {
    unsigned destination;
    const void* source;
    int present, bytes;
};
struct CopyGroups : std::deque<std::vector<Copy>> {
    CopyGroups() { emplace_back(); }
};
inline std::map<unsigned, CopyGroups> pending_copies;

}  // namespace emulation

namespace qmoe {

inline unsigned dynamic_shared_address() { return 0; }
inline void dependent_launch() {}
inline void dependent_wait() {}
inline void dependent_begin() {}

template <int Count>
inline void keep_registers() {}
template <int Count>
inline void take_registers() {}
inline void tensor_fence() {}

inline void barrier_init(unsigned barrier, unsigned arrivals) {
    emulation::barriers[barrier] = {arrivals, arrivals, 0};
}
inline void barrier_init_fence() {}

inline void barrier_arrive(unsigned barrier) {
    emulation::Barrier& own = emulation::barriers.at(barrier);
    if (--own.missing == 0) {
        own.missing = own.arrivals;
        ++own.phase;
    }
}
inline bool barrier_test(unsigned barrier, unsigned parity) {
    return emulation::barriers.at(barrier).phase % 2 != parity;
}
inline void barrier_wait(unsigned barrier, unsigned parity) {
    for (int turns = 0; !barrier_test(barrier, parity); ++turns) {
        if (turns == 100000) {
            emulation::fail("a barrier is waited for in vain");
        }
        emulation::wait(emulation::State::kReady, "mbarrier");
    }
}

template <int Bytes>
inline void copy_async(unsigned destination, const void* source, int present) {
    if (reinterpret_cast<unsigned long long>(source) % Bytes) {
        emulation::fail("an asynchronous copy is misaligned");
    }
    std::memset(emulation::shared_place(destination, Bytes), 0xff, Bytes);
    emulation::pending_copies[threadIdx.x].back().push_back({destination, source, present, Bytes});
}
template <class T>
inline T load_streamed(const T* source) {
    return *source;
}
inline void copy_commit() { emulation::pending_copies[threadIdx.x].emplace_back(); }
template <int Pending>
inline void copy_wait() {
    // The last group is the one that isn't committed.
    auto& groups = emulation::pending_copies[threadIdx.x];
    while (groups.size() > Pending + 1) {
        for (const emulation::Copy& copy : groups.front()) {
            unsigned char* to = emulation::shared_place(copy.destination, copy.bytes);
            std::memset(to, 0, copy.bytes);
            std::memcpy(to, copy.source, copy.present);
        }
        groups.pop_front();
    }
}

inline void store_shared(unsigned address, unsigned value) {
    std::memcpy(emulation::shared_place(address, 4), &value, 4);
}
inline void store_shared_quad(unsigned address, const unsigned (&values)[4]) {
    std::memcpy(emulation::shared_place(address, 16), values, 16);
}
template <int Words>
inline void load_shared(unsigned address, unsigned* to) {
    std::memcpy(to, emulation::shared_place(address, 4 * Words), 4 * Words);
}

inline unsigned transpose_halves(unsigned pair) {
    const unsigned i = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    return emulation::exchange(pair, "movmatrix", [=](auto of) {
        const unsigned first = of(4 * (2 * c) + i / 2), second = of(4 * (2 * c + 1) + i / 2);
        return (first >> (16 * (i % 2)) & 0xffffu) | (second >> (16 * (i % 2)) & 0xffffu) << 16;
    });
}

}  // namespace qmoe

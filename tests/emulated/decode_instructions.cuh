// Host versions of the functions of the kernels' decode_instructions.cuh, for cuda_on_host.h.
//
// A background copy happens when it is waited for, so that a missing wait shows. Products of matrices are exact sums,
// rounded once.

#pragma once

#include <cstdint>

struct alignas(16) float4 {
    float x, y, z, w;
};

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = a | static_cast<unsigned long long>(b) << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return result;
}

inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline int __syncthreads_or(int value) {
    static int any = 0;
    any |= value;
    __syncthreads();
    const int result = any;
    __syncthreads();
    any = 0;
    __syncthreads();
    return result != 0;
}

namespace qmoe::decode {

constexpr unsigned kSharedBytes = 256 << 10;
inline char* shared_memory() {
    alignas(16) static char memory[kSharedBytes];
    static unsigned filled = ~0u;
    if (filled != blockIdx.x) {
        std::memset(memory, 0xff, sizeof memory);
        filled = blockIdx.x;
    }
    return memory;
}

// Addresses of shared memory count from 1024, so that a forgotten base shows.
constexpr unsigned kSharedBase = 1024;
inline unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(static_cast<const char*>(pointer) - shared_memory()) + kSharedBase;
}
template <class T>
inline T read_shared(unsigned address) {
    if (address % sizeof(T) || address < kSharedBase || address - kSharedBase + sizeof(T) > kSharedBytes) {
        emulation::fail("a shared address is misaligned or out of range");
    }
    T value;
    std::memcpy(&value, shared_memory() + (address - kSharedBase), sizeof(T));
    return value;
}

struct PendingCopy {
    unsigned target;
    const char* source;
    int bytes;
    int present;
};
inline std::vector<std::vector<PendingCopy>> pending_groups[1024];
inline std::vector<PendingCopy> pending[1024];

inline void begin_copy(unsigned target, const char* source, int bytes, int count) {
    if (target % bytes || (count && reinterpret_cast<std::uintptr_t>(source) % bytes)) {
        emulation::fail("a background copy is misaligned");
    }
    pending[threadIdx.x].push_back(PendingCopy{target, source, bytes, count});
}
template <int Bytes, int Offset = 0, int Shift = 0>
inline void copy_async(unsigned target, const void* source, bool present) {
    begin_copy(target + Shift, static_cast<const char*>(source) + Offset, Bytes, present ? Bytes : 0);
}
inline void copy_async_part(unsigned target, const void* source, int count) {
    begin_copy(target, static_cast<const char*>(source), 4, count);
}

inline void commit_copies() {
    pending_groups[threadIdx.x].push_back(std::move(pending[threadIdx.x]));
    pending[threadIdx.x].clear();
}

template <int Pending>
inline void wait_copies() {
    auto& groups = pending_groups[threadIdx.x];
    while (groups.size() > Pending) {
        for (const PendingCopy& copy : groups.front()) {
            char* place = shared_memory() + (copy.target - kSharedBase);
            std::memset(place, 0, copy.bytes);
            std::memcpy(place, copy.source, copy.present);
        }
        groups.erase(groups.begin());
    }
}

template <int Words>
inline void load_shared(unsigned address, unsigned (&words)[Words]) {
    struct alignas(4 * Words) Wide {
        unsigned words[Words];
    };
    const Wide wide = read_shared<Wide>(address);
    std::copy(wide.words, wide.words + Words, words);
}
inline unsigned short load_shared_half(unsigned address) { return read_shared<unsigned short>(address); }
inline unsigned load_shared_byte(unsigned address) { return read_shared<unsigned char>(address); }
inline void load_shared_if(bool active, unsigned address, unsigned (&words)[4]) {
    if (active) {
        load_shared(address, words);
    }
}

struct Fragments {
    unsigned a[4], b[2];
};

// c += a b of fragments, of which at(word, index) is one value of a word.
template <class At>
inline void multiply_fragments(float (&c)[4], Fragments own, At at) {
    double sum[4] = {c[0], c[1], c[2], c[3]};
    emulation::exchange(&own, "mma", [&](auto of) {
        const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            const unsigned column = 2 * t + i % 2;
            for (unsigned k = 0; k < 16; ++k) {
                const Fragments& left = *of(4 * g + k % 8 / 2);
                const Fragments& right = *of(4 * column + k % 8 / 2);
                sum[i] += at(left.a[k / 8 * 2 + i / 2], k % 2) * at(right.b[k / 8], k % 2);
            }
        }
        return &own;
    });
    for (int i = 0; i < 4; ++i) {
        c[i] = static_cast<float>(sum[i]);
    }
}

inline void multiply_accumulate(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                unsigned b1) {
    multiply_fragments(c, {{a0, a1, a2, a3}, {b0, b1}},
                       [](unsigned word, int index) { return double(half_to_float(word >> 16 * index & 0xffff)); });
}

inline unsigned join_halves(double low, double high) {
    return float_to_half(static_cast<float>(low)) | static_cast<unsigned>(float_to_half(static_cast<float>(high))) << 16;
}

inline unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
    const auto at = [](unsigned word, int i) { return double(half_to_float(word >> 16 * i & 0xffff)); };
    return join_halves(at(a, 0) * at(b, 0) + at(c, 0), at(a, 1) * at(b, 1) + at(c, 1));
}

inline unsigned round_to_halves(float first, float second) { return join_halves(first, second); }

inline float4 load_fresh(const float* source) { return *reinterpret_cast<const float4*>(source); }

inline int load_fresh(const int* source) { return *source; }

inline void wait_for_predecessor() {}
inline void allow_successor() {}

}  // namespace qmoe::decode

// Enough of CUDA C++ to run the portable kernels on a CPU, one block at a time, each thread a fiber.
//
// A fiber runs until it meets a barrier or a warp-wide function; the next one then runs, forwards or backwards through
// the block, so that a missing barrier shows as a difference between the two orders. Accesses are checked for
// alignment by the compiler's sanitizer and for range by the guard pages of the caller.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

struct Dim {
    unsigned x = 1, y = 1, z = 1;
};
inline Dim threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

using std::max;
using std::min;

template <class T>
inline T __ldg(const T* address) {
    return *address;
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline int __popc(unsigned value) { return std::popcount(value); }
inline float half_to_float(unsigned short bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
inline unsigned short float_to_half(float value) {
    return std::bit_cast<unsigned short>(static_cast<_Float16>(value));
}

// One thread runs at a time.
inline unsigned atomicAdd(unsigned* address, unsigned value) { return std::exchange(*address, *address + value); }
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
    return std::exchange(*address, *address + value);
}
inline unsigned atomicOr(unsigned* address, unsigned value) { return std::exchange(*address, *address | value); }
inline void __threadfence() {}

namespace emulation {

enum class State { kReady, kWarp, kBlock, kDone };

struct Fiber {
    ucontext_t context;
    State state;
    const char* waits_for;
    unsigned long long shared_value;
};

constexpr std::size_t kStackBytes = 128 << 10;
inline std::vector<Fiber> fibers;
inline std::unique_ptr<char[]> stacks;
inline ucontext_t scheduler;
inline unsigned current;

[[noreturn]] inline void fail(const char* message) {
    std::fprintf(stderr, "emulation: %s (thread %u of block %u)\n", message, current, blockIdx.x);
    std::abort();
}

inline void wait(State state, const char* what) {
    Fiber& fiber = fibers[current];
    fiber.state = state;
    fiber.waits_for = what;
    swapcontext(&fiber.context, &scheduler);
}

// Let threads [first, last) go on if all that live wait for the same thing.
inline bool release(unsigned first, unsigned last, State state) {
    const char* what = nullptr;
    for (unsigned i = first; i < last; ++i) {
        if (fibers[i].state == State::kDone) {
            continue;
        }
        if (fibers[i].state != state) {
            return false;
        }
        if (what && std::strcmp(what, fibers[i].waits_for)) {
            fail("threads of a warp wait for different things");
        }
        what = fibers[i].waits_for;
    }
    for (unsigned i = first; i < last; ++i) {
        fibers[i].state = fibers[i].state == State::kDone ? State::kDone : State::kReady;
    }
    return what != nullptr;
}

// The value that each lane of this warp brings, by lane.
template <class T, class Read>
inline T exchange(T value, const char* what, Read read) {
    static_assert(sizeof(T) <= 8);
    std::memcpy(&fibers[current].shared_value, &value, sizeof(T));
    wait(State::kWarp, what);
    const unsigned base = current / 32 * 32;
    T result = read([base](unsigned lane) {
        if (base + lane >= blockDim.x || fibers[base + lane].state == State::kDone) {
            fail("a lane of a warp-wide function has left");
        }
        T other;
        std::memcpy(&other, &fibers[base + lane].shared_value, sizeof(T));
        return other;
    });
    wait(State::kWarp, what);
    return result;
}

inline void (*kernel)(const void*);
inline const void* kernel_arguments;

inline void run_fiber() {
    kernel(kernel_arguments);
    fibers[current].state = State::kDone;
    swapcontext(&fibers[current].context, &scheduler);
}

inline void run_block(bool backwards) {
    const unsigned threads = blockDim.x;
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks.get() + i * kStackBytes;
        fiber.context.uc_stack.ss_size = kStackBytes;
        fiber.context.uc_link = &scheduler;
        fiber.state = State::kReady;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (bool alive = true; alive;) {
        bool progress = false;
        alive = false;
        for (unsigned i = 0; i < threads; ++i) {
            current = backwards ? threads - 1 - i : i;
            if (fibers[current].state == State::kReady) {
                threadIdx.x = current;
                progress = true;
                swapcontext(&scheduler, &fibers[current].context);
            }
            alive |= fibers[current].state != State::kDone;
        }
        for (unsigned base = 0; base < threads; base += 32) {
            progress |= release(base, std::min(base + 32, threads), State::kWarp);
        }
        progress |= release(0, threads, State::kBlock);
        if (alive && !progress) {
            fail("deadlock");
        }
    }
}

inline void launch(void (*entry)(const void*), const void* arguments, unsigned grid, unsigned block, bool backwards) {
    fibers.resize(block);
    stacks = std::make_unique<char[]>(block * kStackBytes);
    kernel = entry;
    kernel_arguments = arguments;
    blockDim = Dim{block};
    gridDim = Dim{grid};
    for (unsigned b = 0; b < grid; ++b) {
        blockIdx.x = backwards ? grid - 1 - b : b;
        run_block(backwards);
    }
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::State::kBlock, "__syncthreads"); }
inline void __syncwarp() { emulation::wait(emulation::State::kWarp, "__syncwarp"); }

template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
    const unsigned lane = threadIdx.x % 32;
    return emulation::exchange(value, "shfl_xor", [=](auto of) { return of(lane ^ mask); });
}
template <class T>
inline T __shfl_sync(unsigned, T value, int source) {
    return emulation::exchange(value, "shfl", [=](auto of) { return of(source); });
}
inline unsigned __ballot_sync(unsigned, bool value) {
    return emulation::exchange(static_cast<unsigned>(value), "ballot", [](auto of) {
        unsigned mask = 0;
        for (unsigned lane = 0; lane < 32; ++lane) {
            mask |= of(lane) << lane;
        }
        return mask;
    });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    return emulation::exchange(value, "reduce_max", [](auto of) {
        unsigned best = 0;
        for (unsigned lane = 0; lane < 32; ++lane) {
            best = std::max(best, of(lane));
        }
        return best;
    });
}

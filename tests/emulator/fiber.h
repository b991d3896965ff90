// A fiber: a stack and where it stands. Hand-written switch on x86-64, ucontext elsewhere.
#pragma once

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "machine.h"

namespace emulator {

constexpr unsigned long STACK = 256 * 1024, PAGE = 64 * 1024, MOST_STACKS = 8 * 1024;

struct Fiber {
    unsigned char* stack;
#if defined(__x86_64__)
    void* at;
#else
    ucontext_t context;
#endif
};

// One of at most MOST_STACKS, each made once: a process may have 65530 mappings and a stack is two.
// An untouched page below it, so that running over its end is an access that fails.
inline unsigned char* stack_of(Stacks& all, int number) {
    if (all.begin == nullptr) {
        void* p = mmap(nullptr, MOST_STACKS * (STACK + PAGE), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        all.begin = static_cast<unsigned char*>(p);
    }
    for (; all.made <= static_cast<unsigned>(number); all.made++) {
        mprotect(all.begin + all.made * (STACK + PAGE), PAGE, PROT_NONE);
    }
    return all.begin + static_cast<unsigned>(number) * (STACK + PAGE) + PAGE;
}

// How far below the end of its stack a thread begins: a multiple of PAGE apart, the frames of all
// would be kept in the same few lines of the cache.
inline unsigned long stagger(int number) { return static_cast<unsigned>(number) % 64 * 576; }

#if defined(__x86_64__)
extern "C" void emulator_switch(void** from, void* to);  // fiber.cpp

inline void switch_fiber(Fiber& from, Fiber& to) { emulator_switch(&from.at, to.at); }

inline void start_fiber(Fiber& fiber, int number, void (*body)()) {
    void** top = reinterpret_cast<void**>(fiber.stack + STACK - stagger(number));
    *--top = nullptr;                         // where `body` would return to; aligns its frame
    *--top = reinterpret_cast<void*>(body);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.at = top;
}
#else
inline void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

inline void start_fiber(Fiber& fiber, int number, void (*body)()) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK - stagger(number);
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, body, 0);
}
#endif

}  // namespace emulator

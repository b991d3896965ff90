// A fiber: a stack and where on it execution stopped. Switching is hand-written on x86-64 and uses
// ucontext elsewhere.
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

// Returns stack `number` of at most MOST_STACKS. Stacks are made once and kept, because a process may
// have only 65530 memory mappings and each stack takes two. Below each lies an inaccessible guard
// page, so that a stack overflow is a segmentation fault.
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

// Offset from the end of its stack at which a thread begins. Without it, the frames of all threads
// would be multiples of PAGE apart and compete for the same few cache lines.
inline unsigned long stagger(int number) { return static_cast<unsigned>(number) % 64 * 576; }

#if defined(__x86_64__)
extern "C" void emulator_switch(void** from, void* to);  // fiber.cpp

inline void switch_fiber(Fiber& from, Fiber& to) { emulator_switch(&from.at, to.at); }

inline void start_fiber(Fiber& fiber, int number, void (*body)()) {
    void** top = reinterpret_cast<void**>(fiber.stack + STACK - stagger(number));
    *--top = nullptr;                         // return address of `body`; also aligns its frame
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

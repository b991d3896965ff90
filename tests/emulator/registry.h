// Makes a C entry point for a kernel: EMULATE(name), in a file that includes the kernel's source.
#pragma once

#include <string.h>

#include <utility>

namespace emulator {

// Bytes kept for an argument: a pointer or a number.
constexpr size_t SLOT = 8;

// The arguments are copied to static memory, where every thread of the launch reads them. Every
// library of kernels compiles this, and a std::tuple would take a fifth of that time.
template <auto KERNEL_FUNCTION, class... P, size_t... I>
int start(void (*)(P...), std::index_sequence<I...>, const Launch& launch, void** arguments) {
    static_assert(((sizeof(P) <= SLOT) && ...));
    alignas(SLOT) static u8 held[sizeof...(P) + 1][SLOT];
    (memcpy(held[I], arguments[I], sizeof(P)), ...);
    return run(launch, [] { KERNEL_FUNCTION(*reinterpret_cast<P*>(held[I])...); });
}

template <class... P>
constexpr std::index_sequence_for<P...> places(void (*)(P...)) {
    return {};
}

}  // namespace emulator

#define EMULATE(name)                                                                      \
    extern "C" int emulate_##name(const emulator::Launch* launch, void** arguments) {      \
        return emulator::start<&name>(&name, emulator::places(&name), *launch, arguments); \
    }

// Makes a C entry point for a kernel: EMULATE(name), in a file that includes the kernel's source.
#pragma once

#include <tuple>
#include <utility>

namespace emulator {

template <class Held, size_t... I>
void fill(Held& held, void** arguments, std::index_sequence<I...>) {
    ((std::get<I>(held) = *static_cast<std::tuple_element_t<I, Held>*>(arguments[I])), ...);
}

// The arguments are copied to static memory, where every thread of the launch reads them.
template <auto KERNEL_FUNCTION, class... P>
int start(void (*)(P...), const Launch& launch, void** arguments) {
    static std::tuple<P...> held;
    fill(held, arguments, std::index_sequence_for<P...>());
    return run(launch, [] { std::apply(KERNEL_FUNCTION, held); });
}

}  // namespace emulator

#define EMULATE(name)                                                                     \
    extern "C" int emulate_##name(const emulator::Launch* launch, void** arguments) {     \
        return emulator::start<&name>(&name, *launch, arguments);                         \
    }

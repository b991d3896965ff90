// What g++ -fsanitize=thread calls before every load and store of the kernel's own code. Taken here
// for the emulator's checks; the sanitizer's own library is not linked.
#include "machine.h"

namespace emulator {
void access(const void* address, u64 bytes, bool write, const void* site);
}

#define HOOKS(n)                                                                          \
    void __tsan_read##n(void* p) {                                                        \
        emulator::access(p, n, false, __builtin_return_address(0));                       \
    }                                                                                     \
    void __tsan_write##n(void* p) {                                                       \
        emulator::access(p, n, true, __builtin_return_address(0));                        \
    }                                                                                     \
    void __tsan_unaligned_read##n(void* p) {                                              \
        emulator::access(p, n, false, __builtin_return_address(0));                       \
    }                                                                                     \
    void __tsan_unaligned_write##n(void* p) {                                             \
        emulator::access(p, n, true, __builtin_return_address(0));                        \
    }

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, unsigned long n) {
    emulator::access(p, n, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long n) {
    emulator::access(p, n, true, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}

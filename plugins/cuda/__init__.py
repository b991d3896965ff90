"""The CUDA driver, the compiler, launches, and the device functions that kernels share."""

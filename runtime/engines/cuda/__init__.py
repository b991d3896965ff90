"""The engine of NVIDIA GPUs: the operators' kernels, captured into one CUDA graph per step."""

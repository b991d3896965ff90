"""The engine of NVIDIA GPUs: the rooms' kernels, captured into one CUDA graph per step."""

"""The engine of a Jetson Thor: TensorRT engines whose custom layers are the operators' kernels."""

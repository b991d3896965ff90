"""The rooms as TensorRT plugins, derived from their contracts and launch rules."""

"""TensorRT plugins for the operators, derived from their contracts and launch rules."""

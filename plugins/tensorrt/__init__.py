"""TensorRT plugins for the rooms, derived from their contracts and launch rules."""

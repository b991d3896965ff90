"""A package on disk to answers. Never imports onnx or reads a checkpoint."""

"""The runtime: loads a package and answers requests. Never imports onnx or reads a checkpoint."""

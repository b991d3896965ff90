"""Builds the ONNX graphs of the decode loop's steps from model sizes."""

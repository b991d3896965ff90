"""Lowers ONNX graphs to launch programs with packed weights."""

"""Kernels for the standard ONNX nodes around the rooms, and for filling memory.

They have no contract of their own: the nodes' definition is ONNX's. `launch` says which ports each
kernel's launch names.
"""

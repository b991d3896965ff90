"""Kernels for the standard ONNX nodes between the operators, and for filling memory.

They have no contract of their own: ONNX defines these nodes. `launch` lists the ports that each
launch uses.
"""

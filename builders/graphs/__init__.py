"""Model sizes in, ONNX graphs out: what each step of the decode loop computes."""

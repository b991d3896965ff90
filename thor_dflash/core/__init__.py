"""What every layer uses: errors, tensors, model sizes, strict decoding, progress."""

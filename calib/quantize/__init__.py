"""Quantises BF16 checkpoints: NVFP4 and FP8, in the layouts and dialects of published ones."""

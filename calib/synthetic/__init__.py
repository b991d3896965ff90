"""Checkpoints of published shapes with random values, to rehearse a build without the weights."""

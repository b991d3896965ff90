"""Checkpoint directories as published, read by what their config and tensors say."""

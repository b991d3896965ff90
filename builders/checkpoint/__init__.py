"""Readers of published checkpoint directories, by their config and tensors."""

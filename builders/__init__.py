"""Builds packages on disk from checkpoints. Never opens a session."""

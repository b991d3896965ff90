"""Checkpoints to a package on disk. Never opens a session."""

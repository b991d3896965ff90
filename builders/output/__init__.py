"""Writes packages: weight files, and the atomic appearance of a directory."""

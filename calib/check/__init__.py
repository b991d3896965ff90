"""Compares two engines with each other, and each operator with its definition."""

"""Compares a package with a reference on the same tokens: what quantising has cost."""

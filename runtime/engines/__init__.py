"""Engines: each runs a package's graphs on one kind of machine."""

"""Engines: what runs a package's graphs on one kind of machine."""

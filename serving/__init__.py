"""Answering over a socket."""

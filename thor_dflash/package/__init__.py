"""The package on disk: all that builders and the runtime share."""

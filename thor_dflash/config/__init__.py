"""The configuration tree, one module per section."""

"""Statistics of a target's activations, taken from documents that it reads."""

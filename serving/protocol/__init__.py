"""TDP/1: messages, codec and validation."""

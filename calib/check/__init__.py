"""Two engines held against each other, and each operator against its definition."""

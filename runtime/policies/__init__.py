"""The policies that shape blocks, one per file; runtime/block.py has their protocol."""

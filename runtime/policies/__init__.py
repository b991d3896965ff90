"""The policies that shape blocks, one per file; runtime/decoding/block.py has their protocol."""

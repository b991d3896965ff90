"""What shapes blocks: one file a policy, all behind runtime/block.py."""

"""Images in prompts: pixels to patches, the tower's rows and their cache, positions."""

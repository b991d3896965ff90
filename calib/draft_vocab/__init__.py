"""Chooses the token ids that a drafter may propose."""

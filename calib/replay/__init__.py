"""Replays recorded conversations and tool-call samples against a session or a server."""

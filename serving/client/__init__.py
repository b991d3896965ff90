"""Clients of a plan server: RemotePlanner for one thread, AsyncPlanner for asyncio."""

"""ZeroMQ transport: router socket, CURVE, keepalive, endpoints."""

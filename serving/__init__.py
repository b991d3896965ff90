"""The plan server, its clients, and the HTTP gateway."""

"""The plan server: sockets' handlers, scheduler, workers, reports."""

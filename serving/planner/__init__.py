"""Planners and backends: a request in, a plan out."""

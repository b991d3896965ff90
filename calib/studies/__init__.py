"""Measurements of planner-nano: one script a question."""

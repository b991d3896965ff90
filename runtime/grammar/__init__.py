"""Constrained answers: the policy, the compiler, and the check of schemas."""

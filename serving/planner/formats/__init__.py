"""Formats of plans beside `tdp.plan.v1`: their grammars, and readers that do not trust them."""

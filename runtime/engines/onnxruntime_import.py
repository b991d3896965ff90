"""ONNX Runtime without its telemetry. No other module imports it.

Since 1.29, ONNX Runtime's Linux builds send their vendor what they run (the process, names and
hashes of models, times) unless it is switched off. A robot sends nothing that its owner did not
ask for.
Source: https://github.com/microsoft/onnxruntime, docs/Privacy.md and pull request 27379.
"""

# onnxruntime publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import os

__all__ = ["ort"]

# The import itself would already note the process and make a database in the user's cache.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # noqa: TID251

import onnxruntime as ort

ort.disable_telemetry_events()  # if something else in the process imported it first

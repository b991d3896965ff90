"""The decode loop and what it runs on: blocks, proposers, model, state, telemetry."""

"""Block-diffusion speculative decoding of a robot planner on one edge board."""

__version__ = "0.2.0.dev0"

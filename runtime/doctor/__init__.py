"""Checks what this machine can run, and names the command that fixes each problem."""

"""Measurements: profiles, power, start-up, teacher-forced scores, the CUDA bench."""

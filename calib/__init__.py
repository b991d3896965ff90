"""Calibration: the synthetic planning corpus and the training of the small model that ships in
the repository.
"""

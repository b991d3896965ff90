"""Calibration and checks: the synthetic planning corpus, the training of the small model that ships
in the repository, measurements, and the comparison of engines.
"""

"""Precision and training state of a fit, states of its layers, and code that reads parameters."""

"""Gradients, main parameters and precision of a fit."""

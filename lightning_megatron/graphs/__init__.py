"""Capture of computations as graphs, which are replayed without Python."""

"""Checkpoints of a run, in Lightning's terms."""

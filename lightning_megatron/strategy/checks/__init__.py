"""Checks before training."""

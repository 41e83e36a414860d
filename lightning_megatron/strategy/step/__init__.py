"""Execution of the user's step on microbatches."""

"""Microbatches and the executor of pipeline schedules."""

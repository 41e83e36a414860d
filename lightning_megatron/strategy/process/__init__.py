"""Processes of a job: launch, rendezvous, failures, hangs, signals and random states."""

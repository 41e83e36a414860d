"""Modules of the user during a fit: their state, buffers and attributes."""

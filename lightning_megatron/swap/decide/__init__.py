"""Decisions before a replacement: kinds of blocks, plans of models and pipeline stages."""

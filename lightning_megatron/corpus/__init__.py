"""Cleaning of raw text: character repair, length filter, deduplication and decontamination."""

"""Cleaning of raw text: fixed characters, short documents, near-duplicates and test documents."""

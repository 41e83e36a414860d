"""Mixtures of experts in the place of MLPs: who gets which token, and what the experts make of it."""

"""Grouped matrix products of experts, and the choice of their backend."""

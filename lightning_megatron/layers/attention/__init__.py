"""Attention of whole rows: what tokens attend to, and the kernels that compute it."""

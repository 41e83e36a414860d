"""Linear layers and norms that compute with Transformer Engine, a library of NVIDIA."""

"""Linear layers and norms that compute with NVIDIA's Transformer Engine."""

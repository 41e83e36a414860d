"""Linear layers that compute in 8 bits: casts with scales, products and their gradients."""

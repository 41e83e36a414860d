"""Tensor-parallel replacements of ``torch.nn`` blocks, and the rules that choose them."""

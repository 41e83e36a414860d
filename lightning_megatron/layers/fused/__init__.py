"""Choice of fused kernels, and operators that they compute."""

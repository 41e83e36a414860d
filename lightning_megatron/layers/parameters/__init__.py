"""Parameters of layers: their initial values, stacks, and sums of gradients."""

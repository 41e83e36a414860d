"""Selection of the experts of each token, with the losses that balance their load."""

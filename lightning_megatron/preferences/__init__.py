"""Training of language models on which of two answers is better."""

"""Maps between the tensors of Hugging Face models and of this package: names, rows and factors."""

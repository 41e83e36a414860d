"""Reading, cutting, copying and exporting the weights of Hugging Face folders."""

"""Replaced Hugging Face models: their faces, names, adapters and folders."""

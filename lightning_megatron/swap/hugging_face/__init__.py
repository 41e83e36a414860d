"""Replaced Hugging Face models: their interfaces, tensor names, adapters and folders."""

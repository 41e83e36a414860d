"""Models built by ``from_pretrained`` without their weights, and their replacement."""

"""Sharded layers, each equal to its torch.nn twin."""

"""Models built from the sharded layers."""

"""Models built from the sharded layers, and the division of models into pipeline stages."""

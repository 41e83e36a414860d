"""Names, packing and low-rank parts of tensors: the map between two models' parameters."""

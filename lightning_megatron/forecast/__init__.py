"""Time of a step, found by running the model's own code on tensors without elements."""

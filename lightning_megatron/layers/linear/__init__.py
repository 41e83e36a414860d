"""Linear layers of all formats of numbers, sharded over the tensor axis."""

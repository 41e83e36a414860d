"""Tasks: data, modules and programs built from public names of this package alone."""

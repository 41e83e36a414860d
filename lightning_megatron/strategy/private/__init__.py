"""Private names of Lightning that this project uses."""

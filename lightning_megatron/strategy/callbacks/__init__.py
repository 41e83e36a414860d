"""Lightning callbacks of this package."""

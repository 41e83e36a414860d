"""Text generation with a key/value cache, in every layout."""

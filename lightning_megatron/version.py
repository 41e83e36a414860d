"""Version of the package; a source tree that is not installed has one, too."""

__version__ = "0.1.0"

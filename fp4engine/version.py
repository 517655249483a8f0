"""The package's version: the only place that says it."""

__version__ = "0.1.0"

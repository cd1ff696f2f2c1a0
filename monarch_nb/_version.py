"""The version, in a place that any layer may read and that imports nothing."""

__version__ = "0.1.0"

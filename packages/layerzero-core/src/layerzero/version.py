"""The version of the core, in one place that costs nothing to read."""

__version__ = "0.2.0"

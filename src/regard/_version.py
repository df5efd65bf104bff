"""The version of regard, kept here alone."""

__version__ = "0.1.0"

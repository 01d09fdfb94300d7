"""Language models whose past is a memory instead of a growing KV cache."""

__version__ = "0.1.0"

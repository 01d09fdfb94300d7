"""Mixers of rules that extend the core ones: read `mixers` first."""

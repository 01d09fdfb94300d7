"""Ops of rules that extend the core ones: read `ops` first."""

"""Modules that mix tokens: projections, one op, output. One file a mixer; base.py has what they share."""

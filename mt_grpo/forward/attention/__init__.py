"""Attention over packed trees: one rule, three implementations."""

"""Attention over packed trees: one rule, three kernels."""

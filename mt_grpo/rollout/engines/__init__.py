"""Engines: they sample tokens."""

"""The ways weights travel."""

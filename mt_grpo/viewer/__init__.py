"""Trajectories as pictures."""

from mt_grpo.viewer.terminal import render_trajectory

__all__ = ["render_trajectory"]

"""Trajectories as pictures."""

from mt_grpo.viewer.terminal import render_trajectory, visible

__all__ = ["render_trajectory", "visible"]

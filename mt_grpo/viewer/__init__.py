"""Trajectories in a terminal."""

from mt_grpo.viewer.terminal import render_trajectory, visible

__all__ = ["render_trajectory", "visible"]

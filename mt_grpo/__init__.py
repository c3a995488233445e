"""GRPO for multi-turn tool-using agents, as a plugin to Hugging Face TRL."""

__version__ = "0.1.0"

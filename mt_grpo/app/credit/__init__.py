"""`mt-grpo credit`: which credit rule suits the rewards of a run."""

"""`mt-grpo doctor`: whether a run can begin, whether it fits, and about how long a step takes."""

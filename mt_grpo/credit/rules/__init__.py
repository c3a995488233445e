"""The credit rules, each a pure function from a `RewardBatch` to one advantage per turn, (B, K)."""

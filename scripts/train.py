"""Trains an agent from a recipe under `accelerate launch`: `scripts/train.py --config RECIPE.yaml`."""

import sys

from mt_grpo.cli import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))

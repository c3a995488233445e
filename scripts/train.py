"""Trains an agent from a recipe under `accelerate launch`: `scripts/train.py RECIPE.yaml`."""

import sys

from mt_grpo.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

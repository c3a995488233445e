"""`python -m mt_grpo` and `mt-grpo` are one command. Ctrl-C ends it with a line while its modules are imported."""

import sys

from mt_grpo.preemption import ends_at_once


def main() -> int:
    """Imports the command line, which takes a moment, and runs it."""
    with ends_at_once():
        from mt_grpo import cli
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

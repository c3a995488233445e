"""`python -m mt_grpo` is the `mt-grpo` command."""

import sys

from mt_grpo.cli import main

sys.exit(main())

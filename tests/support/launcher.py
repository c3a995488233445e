"""A forked program whose processes are forked too, where accelerate starts them: `launcher -m mt_grpo train ...`"""

import sys

from support.forked import fork_what_is_launched
from support.forking import run_python

if __name__ == "__main__":
    fork_what_is_launched()
    run_python(sys.argv[1:])

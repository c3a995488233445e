"""`python -m mt_grpo` and `mt-grpo` are one command. Ctrl-C ends it with a line while its modules are imported."""

import os
import sys
import threading
import time

from mt_grpo.preemption import ends_at_once

_SECONDS = 2.0  # in which threads end that are about to


def main() -> int:
    """Imports the command line, which takes a moment, and runs it."""
    with ends_at_once():
        from mt_grpo import cli
    status = cli.main()
    threading.Thread(target=_say_what_is_waited_for, daemon=True).start()
    return status


def _say_what_is_waited_for() -> None:
    """Names the threads that keep the process when its command is over: Python waits for all but daemons."""
    time.sleep(_SECONDS)
    alive = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    if alive:
        line = f"mt-grpo: the command is over, and the process ends once these threads do: {', '.join(alive)}.\n"
        os.write(2, line.encode())


if __name__ == "__main__":
    sys.exit(main())

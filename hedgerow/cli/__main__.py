"""`python -m hedgerow.cli`, and what the `hedgerow` command runs."""

import os
import signal
import sys
from typing import NoReturn


def run() -> NoReturn:
    """Run the command. Ctrl-C is no traceback, neither while the parts are imported nor while they are taken down."""
    if os.getpid() == 1:  # of a container, where the kernel ignores what is left to its default action
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its notes on connections are not the user's
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us: the next socket would take its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  for as long as the process lives
    try:
        from hedgerow.cli.main import main

        status = main()
    except KeyboardInterrupt:
        status = 130
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


if __name__ == "__main__":
    run()

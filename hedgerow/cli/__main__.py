"""`python -m hedgerow.cli`, and what the `hedgerow` command runs."""

import os
import signal
import sys
from typing import NoReturn


def run() -> NoReturn:
    """Run the command. Ctrl-C is no traceback, neither while the parts are imported nor while they are taken down."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its notes on connections are not the user's
    try:
        from hedgerow.cli.main import main

        status = main()
    except KeyboardInterrupt:
        status = 130
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


if __name__ == "__main__":
    run()

"""`python -m hedgerow.cli`: the `hedgerow` command without installing anything."""

import sys

from hedgerow.cli.main import main

sys.exit(main())

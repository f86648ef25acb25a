"""``python -m relaxmpi``: the command line."""

import sys

from relaxmpi.cli import main

sys.exit(main())

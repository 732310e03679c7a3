"""`python -m raywl`: the command line."""

import sys

from raywl.cli import main

sys.exit(main())

"""`python -m siamesenorm` is the command line."""

import sys

from siamesenorm.cli import main

sys.exit(main())

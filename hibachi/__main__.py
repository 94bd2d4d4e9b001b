"""`python -m hibachi` is the command `hibachi`."""

import sys

from hibachi.cli import main

sys.exit(main())

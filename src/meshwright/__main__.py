"""`python -m meshwright` is the same as `mw`."""

import sys

from meshwright.cli import main

sys.exit(main())

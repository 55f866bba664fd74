"""`python -m caracal_runtimes` is the command `caracal`."""

from __future__ import annotations

import sys

from caracal_runtimes.cli import main

sys.exit(main())

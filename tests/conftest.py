"""Before anything imports torch or numpy: the test processes share the cores among them, so each has one thread."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

"""Before anything imports torch or numpy: the test processes share the cores among them, so each has one thread.

And nothing is kept for the next run: a test that passes because of the last one proves nothing.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CARACAL_CACHE"] = "off"

"""For all tests: processes are born without torch, which costs each host agent a second; tests that want it say so."""

import os

os.environ.setdefault("MONARCH_NB_PRELOAD", "numpy")

"""For all tests: how the processes they start are set up, hundreds of them."""

import os
import sys

# Born without torch and numpy, which cost each host agent a second; tests that want them say so.
os.environ.setdefault("MONARCH_NB_PRELOAD", "")
# Compiled once, not in each process; the tests themselves too.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

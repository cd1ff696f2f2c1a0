"""How much tests of random histories try: enough for every day, and ten times that with MONARCH_TEST_EFFORT=thorough.

Every day the same histories are tried, so that a failure is of what was changed and not of luck; the thorough ones
are others each time, and a failure prints how to meet it again.
"""

import os

THOROUGH = os.environ.get("MONARCH_TEST_EFFORT") == "thorough"


def tries(count: int) -> int:
    """`count`, or ten times as many."""
    return count * 10 if THOROUGH else count

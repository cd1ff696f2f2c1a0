"""Which frames of an error are shown."""

import json

from monarch_nb.wire.errors import ENGINE, At, is_mistake, without_engine

CELL = At("/tmp/ipykernel_1/1.py", "w.slice(x=1)")
OURS = At(f"{ENGINE}shape/region.py", "self._check(dims)")
RAISES = At(f"{ENGINE}shape/region.py", "raise DimensionError(")
LIBRARY = At(json.__file__, "return loads(s)")


def test_errors_that_the_engine_raises_on_purpose_point_at_the_caller() -> None:
    assert is_mistake([CELL, OURS, RAISES])
    assert without_engine([CELL, OURS, RAISES]) == [0]
    assert is_mistake([CELL, LIBRARY, OURS, LIBRARY, RAISES])
    assert without_engine([CELL, LIBRARY, OURS, LIBRARY, RAISES]) == [0, 1], "a library that calls the engine is shown"


def test_users_code_under_the_engine_is_shown() -> None:
    assert is_mistake([CELL, OURS, LIBRARY, CELL])
    assert without_engine([CELL, OURS, LIBRARY, CELL]) == [0, 3]


def test_errors_inside_of_the_engine_keep_their_frames() -> None:
    assert not is_mistake([CELL, OURS])
    assert not is_mistake([CELL, OURS, LIBRARY])
    assert not is_mistake([CELL, LIBRARY])
    assert not is_mistake([])

"""Which tensors may have new memory: those whose memory nothing else shows."""

from typing import Any

import pytest

from monarch_nb.tensor.references import HeldObjects, LogicalMemory, Reference

pytestmark = pytest.mark.timeout(60)


def test_a_tensor_is_unaliased_before_and_after_a_view_is_held() -> None:
    stream: Any = object()
    held = HeldObjects({})
    tensor, view, other = (held.hold(stream, None, None) for _ in range(3))  # type: ignore[arg-type]
    assert held.is_alone(tensor)
    tensor.memory = view.memory = LogicalMemory()
    other.memory = LogicalMemory()
    assert [held.is_alone(one) for one in (tensor, view, other)] == [False, False, True]
    del view
    assert held.is_alone(tensor)
    assert isinstance(other, Reference)

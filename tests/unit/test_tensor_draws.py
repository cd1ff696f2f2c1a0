"""Random numbers of streams: which operations draw, and from which generators."""

import torch

from monarch_nb.tensor.seeds import drawing_operations


def test_every_operation_that_draws_is_known() -> None:
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, qualified = name.partition("::")
        base, _, overload = qualified.partition(".")
        if namespace == "aten":
            operation = getattr(getattr(torch.ops.aten, base), overload or "default", None)
            if operation is not None and torch.Tag.nondeterministic_seeded in operation.tags:
                tagged.add(operation)
    assert tagged
    assert set(drawing_operations()) == tagged

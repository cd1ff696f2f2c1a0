"""Operations by their names."""

from typing import Any

import torch


def operation_named(name: str) -> Any:
    """The operation of a name such as `aten.add.Tensor`. Raises LookupError where this process has none."""
    namespace, base, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except AttributeError:
        raise LookupError(
            f"this process has no operation {name}: import what registers it on the workers too, as in a set-up cell"
        ) from None

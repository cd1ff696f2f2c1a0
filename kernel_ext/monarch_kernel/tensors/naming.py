"""Names of tensors in a program: variables of the notebook, and parameters of modules in them."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import IPython

_MOST = 2000  # tensors of one module that are named


def variables() -> dict[str, Any]:
    """Returns the current variables of the notebook."""
    shell = IPython.get_ipython()
    return {} if shell is None else dict(shell.user_ns)


def handle_type() -> Any:
    """Returns the type of sharded tensors; None before the first one, so that torch is not imported for this."""
    module = sys.modules.get("monarch_nb.tensor.handle")
    return getattr(module, "MeshTensor", None)


def names_of(namespace: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """Names by number of the mesh's stream and number of the tensor; of several, the one that comes first."""
    handle = handle_type()
    names: dict[tuple[int, int], str] = {}
    if handle is None:
        return names
    for name, tensor in _tensors(namespace, handle):
        reference = tensor.reference
        names.setdefault((reference.stream.number, reference.number), name)
    return names


def name_of(namespace: Mapping[str, object], tensor: object) -> str:
    """Returns the variable that holds this very tensor; "" for none."""
    return next((name for name, value in tuple(namespace.items()) if value is tensor and not name.startswith("_")), "")


def _tensors(namespace: Mapping[str, Any], handle: Any) -> Iterator[tuple[str, Any]]:
    module_type = getattr(sys.modules.get("torch.nn"), "Module", ())
    modules = []
    for name, value in namespace.items():
        if name.startswith("_"):  # stored outputs of IPython too
            continue
        if isinstance(value, handle):
            yield name, value
            yield from _gradient(name, value, handle)
        elif isinstance(value, module_type):
            modules.append((name, value))
    for name, module in modules:
        for index, (path, value) in enumerate([*module.named_parameters(), *module.named_buffers()]):
            if index >= _MOST:
                break
            if isinstance(value, handle):
                yield f"{name}.{path}", value
                yield from _gradient(f"{name}.{path}", value, handle)


def _gradient(name: str, value: Any, handle: Any) -> Iterator[tuple[str, Any]]:
    gradient = value.grad if value.is_leaf else None
    if isinstance(gradient, handle):
        yield f"{name}.grad", gradient

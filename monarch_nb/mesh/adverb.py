"""What help, Shift-Tab and completion see of an endpoint and of its adverbs: the user's own signature and docstring."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from monarch_nb.mesh.arguments import callers_signature, hidden_from_callers
from monarch_nb.runtime import EndpointProperty

F = TypeVar("F", bound=Callable[..., Any])

_GIVES = {
    "call": "Future[ValueMesh[{}]]",
    "call_one": "Future[{}]",
    "choose": "Future[{}]",
    "stream": "Iterator[Future[{}]]",
}


class Described(Protocol):
    """What adverbs are of: an endpoint of a mesh."""

    _title: str

    def _current(self) -> EndpointProperty[..., Any]:
        """The declaration of the endpoint in the class that the mesh has now."""


class PerObject:
    """An attribute that is worked out for each object; the class has another one of that name, or none."""

    def __init__(self, work_out: Callable[[Any], Any], of_class: Any = None) -> None:
        self._work_out = work_out
        self._of_class = of_class

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None:
            return self._work_out(instance)
        if self._of_class is None:
            raise AttributeError("only objects of this class have it")
        return self._of_class


class Adverb(functools.partial[Any]):
    """One adverb of one endpoint. Calling it sends; looking at it shows the endpoint's method."""

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":
            return self.func.__name__
        if name == "__qualname__":
            return f"{self.args[0]._title}.{self.func.__name__}"
        raise AttributeError(f"{self!r} has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<{self.args[0]._title}.{self.func.__name__}>"


class _AdverbOfEndpoint:
    """An adverb of a class of endpoints; each endpoint makes its own when it is first used, and keeps it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._method
        bound = instance.__dict__[self._name] = Adverb(self._method, instance)
        return bound


def adverb(method: F) -> F:
    """Marks a method of Endpoint as an adverb."""
    return _AdverbOfEndpoint(method)  # type: ignore[return-value]  # it is called alike


def declared_signature(endpoint: Described) -> inspect.Signature:
    """The signature of the endpoint's method as callers see it."""
    declared = endpoint._current()
    return callers_signature(declared.method, hidden_from_callers(declared))


def declared_doc(endpoint: Described) -> str | None:
    """The docstring of the endpoint's method."""
    return inspect.getdoc(endpoint._current().method)


def _signature(bound: Adverb) -> inspect.Signature:
    endpoint = bound.args[0]
    signature = declared_signature(endpoint)
    given: Any = signature.return_annotation
    form = _GIVES.get(bound.func.__name__)
    if endpoint._current().explicit_response_port or given is signature.empty or form is None:
        return signature.replace(return_annotation=signature.empty)
    return signature.replace(return_annotation=_Shown(form.format(_annotation(given))))


def _annotation(given: Any) -> str:
    return given if isinstance(given, str) else inspect.formatannotation(given)


def _doc(bound: Adverb) -> str:
    own = inspect.getdoc(bound.func) or ""
    return "\n\n".join(filter(None, (declared_doc(bound.args[0]), f"{bound.func.__name__}: {own}")))


class _Shown:
    """An annotation that is only looked at."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


Adverb.__signature__ = PerObject(_signature)  # type: ignore[attr-defined]
Adverb.__doc__ = PerObject(_doc, Adverb.__doc__)  # type: ignore[assignment]

"""Which process context a body is being encoded or decoded for, readable by the objects that are in it."""

import threading


class _Current(threading.local):
    context: object = None


_current = _Current()


def current_codec() -> object:
    """The `context` of the innermost encode or decode on this thread; None outside of one.

    Objects read it in `__reduce__` and `__setstate__` to bind themselves to the sending or the receiving process.
    """
    return _current.context


def enter_codec(context: object) -> object:
    """Make `context` the current one of this thread. Returns what to hand to `leave_codec`."""
    previous = _current.context
    _current.context = context
    return previous


def leave_codec(previous: object) -> None:
    """Undo the `enter_codec` that returned `previous`."""
    _current.context = previous

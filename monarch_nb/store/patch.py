"""JSON merge patches (RFC 7396): what a view applies to its snapshot."""

from typing import Any

Patch = dict[str, Any]


def apply(state: dict[str, Any], patch: Patch) -> dict[str, Any]:
    """Changes `state` by a patch, in place; gives it back."""
    for key, value in patch.items():
        if value is None:
            state.pop(key, None)
        elif isinstance(value, dict):
            inner = state.get(key)
            state[key] = apply(inner if isinstance(inner, dict) else {}, value)
        else:
            state[key] = value
    return state

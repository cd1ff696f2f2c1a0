"""Messages to views in pieces that proxies let through: some cut connections at messages of 10 MB. Pure."""

from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]
Size = Callable[[object], int]
LARGEST = 4 << 20  # bytes of one message
LONGEST = 1 << 20  # characters of one line in it


def pieces(message: Message, size: Size, most: int = LARGEST) -> Iterator[Message]:
    """Messages of at most about `most` bytes, as `size` has them, that say the same one after the other."""
    match message["type"]:
        case "snapshot":
            first, *rest = _patches(message["state"], size, most)
            yield {**message, "state": first}
            yield from _after(message, rest)
        case "delta":
            first, *rest = _patches(message["patch"], size, most)
            yield {**message, "patch": first}
            yield from _after(message, rest)
        case "logs":
            yield from _lines(message, size, most)
        case "metrics":
            yield from _points(message, size, most)
        case "reply":
            told = f"the answer has {size(message) >> 20} MB, which is more than a page is sent: ask for fewer ranks"
            yield {"type": "reply", "id": message.get("id"), "ok": False, "error": told}
        case _:
            yield message


def _after(message: Message, patches: list[Message]) -> Iterator[Message]:
    """What has no room in the first one follows it as changes of the same number."""
    seq = message["seq"]
    for patch in patches:
        yield {"type": "delta", "prev": seq, "seq": seq, "patch": patch, "now": message["now"]}


def _patches(whole: Message, size: Size, most: int) -> list[Message]:
    """Merge patches that make up a merge patch, or a document, when they are applied in turn; at least one."""
    made: list[Message] = [{}]
    filled = 0
    for path, value, weight in _leaves((), whole, size, max(1, most // 8)):
        if filled and filled + weight > most:
            made.append({})
            filled = 0
        filled += weight
        into = made[-1]
        for key in path[:-1]:
            into = into.setdefault(key, {})
        into[path[-1]] = value
    return made


def _leaves(path: tuple[str, ...], value: Any, size: Size, most: int) -> Iterator[tuple[tuple[str, ...], Any, int]]:
    """Parts of a nested mapping, none above `most` bytes if it can be divided."""
    weight = size(value)
    if path and (weight <= most or not isinstance(value, dict) or not value):
        yield path, value, weight + sum(map(len, path))
        return
    for key, inner in value.items():
        yield from _leaves((*path, key), inner, size, most)


def _lines(message: Message, size: Size, most: int) -> Iterator[Message]:
    rest = {name: message[name] for name in ("type", "id")}
    run: list[Any] = []
    filled = 0
    first = message
    for index, at, level, text in message["lines"]:
        line = (index, at, level, text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)")
        weight = size(line)
        if run and filled + weight > most:
            yield {**first, "lines": run}
            first, run, filled = rest, [], 0
        run.append(line)
        filled += weight
    yield {**first, "lines": run}


def _points(message: Message, size: Size, most: int) -> Iterator[Message]:
    first, rest = message, {name: message[name] for name in ("type", "id")}
    for name, points in message["points"].items():
        share = max(1, len(points) * most // max(most, size(points)))
        for begin in range(0, len(points), share):
            yield {**first, "points": {name: points[begin : begin + share]}}
            first = rest

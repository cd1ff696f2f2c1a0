"""Calls and their outcomes: recorded by controllers, checked when all is over."""

import contextlib
import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch_nb import exceptions

PUBLIC = frozenset(exceptions.__all__)


class Ledger:
    """One controller's, a line at the beginning and one at the end of each call."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        self._lock = threading.Lock()

    def began(self, token: str, kind: str) -> None:
        """A call is made, whose effects carry this token."""
        self._write({"token": token, "kind": kind, "at": round(time.time(), 3)})

    def reads(self, token: str) -> None:
        """Its results are complete, and are about to be read."""
        self._write({"token": token, "reads": True})

    def ended(self, token: str, began: float, ranks: list[int] | None, error: BaseException | None = None) -> None:
        """It was answered by these ranks, or raised."""
        entry: dict[str, Any] = {"token": token, "seconds": time.monotonic() - began, "ranks": ranks}
        if error is not None:
            entry["error"], entry["text"] = type(error).__name__, str(error)[:4000]
        self._write(entry)

    def _write(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        with self._lock:
            os.write(self._file, line)


@dataclass
class Verdict:
    """The calls of a run, counted, and their errors."""

    calls: Counter[str] = field(default_factory=Counter)  # by kind
    results: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by class
    cut_off: int = 0  # whose controllers were killed
    slowest: float = 0.0
    effects: int = 0
    wrong: list[str] = field(default_factory=list)


def judge(folder: Path, killed: set[str], bound: float, names: tuple[str, ...]) -> Verdict:
    """Reads the ledgers and effects in a folder; `killed` are the names of ledgers whose controllers were killed."""
    verdict = Verdict()
    effects = _effects(folder, verdict)
    for path in sorted(folder.glob("ledger-*")):
        open_calls: dict[str, str] = {}
        for entry in _entries(path):
            token = entry["token"]
            if "reads" in entry:
                continue
            if "kind" in entry:
                open_calls[token] = entry["kind"]
                verdict.calls[entry["kind"]] += 1
                continue
            kind = open_calls.pop(token)
            verdict.slowest = max(verdict.slowest, entry["seconds"])
            if entry["seconds"] > bound:
                verdict.wrong.append(f"{kind} {token} took {entry['seconds']:.1f} s: {entry.get('text', 'a result')}")
            if "error" not in entry:
                verdict.results += 1
                lost = [rank for rank in entry["ranks"] if not effects[token][rank]]
                if lost:
                    verdict.wrong.append(f"{kind} {token} was answered by ranks {lost}, which have no effect of it")
                continue
            verdict.errors[entry["error"]] += 1
            text = entry["text"]
            if "no result within" in text:
                verdict.wrong.append(f"{kind} {token} waited for somebody in vain: {text}")
            if entry["error"] not in PUBLIC:
                verdict.wrong.append(f"{kind} {token} raised no public error: {entry['error']}: {text}")
            elif not any(name in text for name in names):
                verdict.wrong.append(f"{kind} {token} raised an error without mesh, rank or host: {text}")
        if path.name in killed:
            verdict.cut_off += len(open_calls)
        else:
            verdict.wrong += [f"{kind} {token} never ended" for token, kind in open_calls.items()]
    return verdict


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last one of a controller that was killed
            yield json.loads(line)


def unread_calls(path: Path) -> set[str]:
    """Returns the calls of a controller whose results it never read, broadcasts and calls of callers aside."""
    unread: set[str] = set()
    for entry in _entries(path):
        if entry.get("kind") in ("all", "one", "host", "body"):
            unread.add(entry["token"])
        else:
            unread.discard(entry["token"])
    return unread


def read_effects(folder: Path) -> list[tuple[int, int, str]]:
    """Returns the rank, process and token of each effect so far."""
    effects = []
    for path in folder.glob("effects-*"):
        _, rank, pid, _ = path.name.split("-")
        effects += [(int(rank), int(pid), token) for token in path.read_text().split()]
    return effects


def _effects(folder: Path, verdict: Verdict) -> dict[str, Counter[int]]:
    """How often each token took effect at each rank."""
    effects: dict[str, Counter[int]] = defaultdict(Counter)
    for rank, _, token in read_effects(folder):
        effects[token][rank] += 1
        verdict.effects += 1
    for token, counts in effects.items():
        more = {rank: count for rank, count in counts.items() if count > 1}
        if more:
            verdict.wrong.append(f"{token} took effect more than once: {more}")
    return effects

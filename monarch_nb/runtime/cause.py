"""Causes of failures: plain data that travels between processes and chains upwards through owners."""

import re
from typing import ClassVar, Literal

import msgspec

from monarch_nb.wire import Harmless

CauseKind = Literal[
    "exception",  # an endpoint raised without a waiting caller, or it raised something that is not an Exception
    "init",  # the actor's __init__ raised
    "exit",  # the process ended by itself
    "signal",  # the process was ended by a signal
    "host",  # the host, or the way to it, was lost
    "aborted",  # the actor failed itself: abort() or kill()
    "killed",  # the process was not needed any more, and was killed: `text` has the reason
    "undeliverable",  # a message of the actor could not be delivered
    "unhandled",  # an owner did not handle `chain`
    "raised",  # an owner raised while it handled `chain`
    "spawn",  # it could not be started again
    "owner",  # its owner has ended
    "left",  # this process has detached it: it lives on without it
    "taken",  # another controller has taken it over
    "preemption",  # a warning only: its host is about to be ended; `text` says by whom
    "shrunk",  # its mesh has shrunk, and it is not part of it any more: not a failure
    "stopped",  # it was stopped: not a failure, but nothing can be called on it any more
]


class Cause(Harmless, frozen=True, kw_only=True, omit_defaults=True):
    """Cause of a failure. `at` is in seconds since the epoch, 0 if unknown; `chain` is the cause of this one."""

    PROSE: ClassVar = ("text", "traceback", "last_lines", "dump")

    kind: CauseKind
    text: str = ""
    actor: str = ""  # name of the failed actor or process, for people
    host: str = ""
    pid: int = 0
    exitcode: int | None = None
    signal: int | None = None
    evicted: bool = False  # its host agent has ended it, for the reason in `text`
    oom: bool = False
    memory: str = ""  # its memory before memory ran out: "9.81 GB 1 s before, 4.10 GB 8 s before"
    last_lines: tuple[str, ...] = ()
    dump: tuple[str, ...] = ()  # the stack of the thread that crashed, as faulthandler reports it
    traceback: str = ""
    at: float = 0.0
    giver: str = ""  # of a lost host: the name, for people, of the job that can replace it
    seconds: float | None = None  # of a preemption: the seconds left at `at`, None if unknown
    chain: "Cause | None" = None

    @property
    def links(self) -> tuple["Cause", ...]:
        """This cause and its chain, the first to happen last."""
        causes = [self]
        while causes[-1].chain is not None:
            causes.append(causes[-1].chain)
        return tuple(causes)

    @property
    def likeness(self) -> str:
        """A key that is equal for causes that are reported as one: numbers in their texts may differ."""
        return "; ".join(map(_likeness, self.links))

    @property
    def origin(self) -> "Cause":
        """The first cause of the chain."""
        return self.links[-1]


class ActorEnd(msgspec.Struct, array_like=True, frozen=True):
    """The end of an actor, and its cause: sent to callers whose call is refused, and to the owner of a failed actor."""

    mesh: str
    rank: int
    incarnation: int
    cause: Cause


def stop_cause(text: str) -> Cause:
    """Returns the cause with which calls on a stopped mesh are answered."""
    return Cause(kind="stopped", text=text)


_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


def _likeness(cause: Cause) -> str:
    ended = cause.exitcode is not None or cause.signal is not None  # their texts name the process
    text = "" if ended else _NUMBERS.sub("#", cause.text)
    host = cause.host if cause.kind == "host" else ""
    return f"{cause.kind} {cause.exitcode} {cause.signal} {cause.oom} {host} {text}"

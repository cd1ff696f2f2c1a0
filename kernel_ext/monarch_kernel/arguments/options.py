"""The lines of %logs, %%prof and %timeline, whose options have values, read by IPython's own parser of options."""

import argparse
import shlex
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from msgspec import Struct, field

from .place import MeshSelection, read_place
from .words import check_options


class _Options:
    """The options of one magic. The other words of its line name a mesh or a slice of one."""

    def __init__(self, magic: str) -> None:
        self._magic = magic
        self._parser = MagicArgumentParser(prog=magic, argument_default=argparse.SUPPRESS)  # type: ignore[no-untyped-call]
        self._parser.allow_abbrev = False
        self._parser.add_argument("words", nargs="*")

    def add(self, *names: str, **form: Any) -> None:
        """Adds options with the same keyword arguments of `add_argument`."""
        for name in names:
            self._parser.add_argument(name, **form)

    def read(self, line: str, allowed: tuple[str, ...]) -> tuple[MeshSelection, dict[str, Any]]:
        """Returns the selection, and the options of the line, which must be allowed ones. Raises UsageError."""
        try:
            namespace, unknown = self._parser.parse_known_intermixed_args(shlex.split(line))
        except (ValueError, UsageError) as error:
            raise UsageError(f"{self._magic}: {error} in {line!r}") from None
        check_options(self._magic, {word.partition("=")[0] for word in unknown}, set(allowed))
        options = vars(namespace)
        return read_place(self._magic, " ".join(options.pop("words", ()))), options


_logs = _Options("%logs")
_logs.add("--follow", "--stderr", "--stdout", action="store_true")
_logs.add("--grep", "--level", "--since")
_logs.add("--last", type=int)

LOG_OPTIONS = ("--follow", "--grep", "--level", "--since", "--last", "--stderr", "--stdout")


class LogArguments(Struct, frozen=True):
    """`%logs NAME gpus=0-2 --grep RE --since 5m`; `filters` are those of `logs_of`."""

    place: MeshSelection
    follow: bool = False
    last: int | None = None
    filters: dict[str, Any] = field(default_factory=dict)


def read_logs(line: str) -> LogArguments:
    """Reads the arguments of %logs. Raises UsageError."""
    selection, options = _logs.read(line, LOG_OPTIONS)
    follow, last = options.pop("follow", False), options.pop("last", None)
    stream = next((name for name in ("stderr", "stdout") if options.pop(name, False)), None)
    return LogArguments(selection, follow, last, {**options, **({"stream": stream} if stream else {})})


_profile = _Options("%%prof")
_profile.add("--torch", action="store_true")
_profile.add("--hz", type=float)

PROFILE_OPTIONS = ("--hz", "--torch")


class ProfileArguments(Struct, frozen=True):
    """`%%prof NAME gpus=0-2 --hz 100 --torch`."""

    place: MeshSelection
    hz: float = 100.0
    torch: bool = False


def read_profile(line: str) -> ProfileArguments:
    """Reads the arguments of %%prof. Raises UsageError."""
    selection, options = _profile.read(line, PROFILE_OPTIONS)
    arguments = ProfileArguments(selection, **options)
    if not 0 < arguments.hz <= 1000:
        raise UsageError("%%prof: --hz is the number of samples a second of each rank: up to 1000, 100 by default")
    return arguments


TIMELINE_OPTIONS = ("--stop", "--save")


class TimelineArguments(Struct, frozen=True):
    """`%timeline NAME gpus=0-2 --save step.json`; without a name it is about the newest."""

    place: MeshSelection | None = None
    stop: bool = False
    save: str = ""


def read_timeline(magic: str, line: str) -> TimelineArguments:
    """Reads the arguments of %timeline, or %%timeline. Raises UsageError."""
    options = _Options(magic)
    options.add("--stop", action="store_true")
    options.add("--save")
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{magic}: {error} in {line!r}") from None
    after_save = words.index("--save") + 1 if "--save" in words else -1
    named = any(not word.startswith("-") and index != after_save for index, word in enumerate(words))
    selection, values = options.read(line if named else f"newest {line}", TIMELINE_OPTIONS)
    return TimelineArguments(selection if named else None, **values)

"""`%logs NAME gpus=0-2 --grep RE --since 5m`, read by IPython's own parser of options."""

import argparse
import shlex
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from msgspec import Struct, field

from .place import MeshSelection, read_place
from .words import check_options

_parser = MagicArgumentParser(prog="%logs", argument_default=argparse.SUPPRESS)  # type: ignore[no-untyped-call]
_parser.allow_abbrev = False
_parser.add_argument("words", nargs="*")
for _flag in ("--follow", "--stderr", "--stdout"):
    _parser.add_argument(_flag, action="store_true")
for _valued in ("--grep", "--level", "--since"):
    _parser.add_argument(_valued)
_parser.add_argument("--last", type=int)

LOG_OPTIONS = ("--follow", "--grep", "--level", "--since", "--last", "--stderr", "--stdout")


class LogArguments(Struct, frozen=True):
    """Arguments of a %logs line; `filters` are those of `logs_of`."""

    place: MeshSelection
    follow: bool = False
    last: int | None = None
    filters: dict[str, Any] = field(default_factory=dict)


def read_logs(line: str) -> LogArguments:
    """Reads the arguments of %logs. Raises UsageError."""
    try:
        given, unknown = _parser.parse_known_intermixed_args(shlex.split(line))
    except (ValueError, UsageError) as error:
        raise UsageError(f"%logs: {error} in {line!r}") from None
    check_options("%logs", {word.partition("=")[0] for word in unknown}, set(LOG_OPTIONS))
    options = vars(given)
    place = read_place("%logs", " ".join(options.pop("words", ())))
    follow, last = options.pop("follow", False), options.pop("last", None)
    stream = next((name for name in ("stderr", "stdout") if options.pop(name, False)), None)
    return LogArguments(place, follow, last, {**options, **({"stream": stream} if stream else {})})

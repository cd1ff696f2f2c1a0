"""`%%prof NAME gpus=0-2 --hz 100 --torch`, read by IPython's own parser of options."""

import argparse
import shlex

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from msgspec import Struct

from .place import MeshSelection, read_place
from .words import check_options

_parser = MagicArgumentParser(prog="%%prof", argument_default=argparse.SUPPRESS)  # type: ignore[no-untyped-call]
_parser.allow_abbrev = False
_parser.add_argument("words", nargs="*")
_parser.add_argument("--torch", action="store_true")
_parser.add_argument("--hz", type=float)

PROFILE_OPTIONS = ("--hz", "--torch")


class ProfileArguments(Struct, frozen=True):
    """Arguments of a %%prof line."""

    place: MeshSelection
    hz: float = 100.0
    torch: bool = False


def read_profile(line: str) -> ProfileArguments:
    """Reads the arguments of %%prof. Raises UsageError."""
    try:
        given, unknown = _parser.parse_known_intermixed_args(shlex.split(line))
    except (ValueError, UsageError) as error:
        raise UsageError(f"%%prof: {error} in {line!r}") from None
    check_options("%%prof", {word.partition("=")[0] for word in unknown}, set(PROFILE_OPTIONS))
    options = vars(given)
    place = read_place("%%prof", " ".join(options.pop("words", ())))
    arguments = ProfileArguments(place, **options)
    if not 0 < arguments.hz <= 1000:
        raise UsageError("%%prof: --hz is the number of samples a second of each rank: up to 1000, 100 by default")
    return arguments

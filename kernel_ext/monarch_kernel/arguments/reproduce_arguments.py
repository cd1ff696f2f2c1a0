"""`%reproduce NAME --step --rank 3 --limit 2G`, read by IPython's own parser of options."""

import argparse
import re
import shlex

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from msgspec import Struct

from .words import check_options

_BYTES = re.compile(r"(\d+)([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(text: str) -> int:
    match = _BYTES.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a number of bytes, such as 512M or 2G")
    return int(match[1]) * _UNITS[match[2].upper()]


_parser = MagicArgumentParser(prog="%reproduce", argument_default=argparse.SUPPRESS)  # type: ignore[no-untyped-call]
_parser.allow_abbrev = False
_parser.add_argument("name", nargs="?")
_parser.add_argument("--step", action="store_true")
_parser.add_argument("--rank", type=int)
_parser.add_argument("--limit", type=_bytes)

REPRODUCE_OPTIONS = ("--step", "--rank", "--limit")


class ReproduceArguments(Struct, frozen=True):
    """Arguments of a %reproduce line."""

    name: str = ""
    step: bool = False
    rank: int | None = None
    limit: int = 1 << 28


def read_reproduce(line: str) -> ReproduceArguments:
    """Reads the arguments of %reproduce. Raises UsageError."""
    try:
        given, unknown = _parser.parse_known_args(shlex.split(line))
    except (ValueError, UsageError) as error:
        raise UsageError(f"%reproduce: {error} in {line!r}") from None
    options = {word.partition("=")[0] for word in unknown if word.startswith("-")}
    check_options("%reproduce", options, set(REPRODUCE_OPTIONS))
    if unknown:
        raise UsageError("%reproduce takes the name of one error, or none")
    return ReproduceArguments(**vars(given))

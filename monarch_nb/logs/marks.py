"""How a proc's Python output lies in its spool until the agent takes it: text, with marks that say what follows.

What is displayed lies among the text, each display a line of its own with a mark before it.

Beside it lie two files of raw output: what C code and child processes write to descriptors 1 and 2. A mark says how far
those had come when it was made, so that all three can be read in the order in which they were written.
"""

from typing import NamedTuple

SIGN = b"\x1e"  # begins a mark; never in the text, see `clean`
LONGEST = 400  # bytes of a mark, at most
TEXT, OUT, ERR = ".txt", ".out", ".err"  # what is added to a spool's name: Python's text, raw stdout, raw stderr
STDOUT, STDERR = 1, 2
DISPLAY = 3  # no text, but one line of a display: see monarch_nb.wire.display
NOBODY = "-"
UNCLAIMED = "?"  # raw output whose call the proc has not told


class Mark(NamedTuple):
    """What the text after it is, and the raw output before it."""

    at: float  # wall clock, seconds
    stream: int
    level: int  # of the record of `logging`, 0 for other text
    call: str  # the call it came from, "" for none
    out: int  # bytes of raw stdout written before
    err: int  # and of raw stderr
    raw: str  # the call that raw output came from which is not told of by an earlier mark, "" for none

    def encode(self) -> bytes:
        """The mark as a line of its own."""
        words = (f"{self.at:.3f}", self.stream, self.level, self.out, self.err, self.call or NOBODY, self.raw or NOBODY)
        return SIGN + " ".join(map(str, words)).encode("ascii", "replace") + b"\n"


BEGIN = Mark(0.0, STDOUT, 0, "", 0, 0, "")


def decode(line: bytes) -> Mark | None:
    """The mark of a line without its end; None for anything else, such as one that a full disk has cut off."""
    words = line[1:].decode("ascii", "replace").split(" ")
    try:
        at, stream, level, out, err, call, raw = ("" if word == NOBODY else word for word in words)
        mark = Mark(float(at), int(stream), int(level), call, int(out), int(err), raw)
    except ValueError:
        return None
    return mark if mark.stream in (STDOUT, STDERR, DISPLAY) and mark.out >= 0 and mark.err >= 0 else None


def clean(text: str) -> str:
    """Text in which nothing can be taken for a mark."""
    return text.replace("\x1e", "\u241e") if "\x1e" in text else text

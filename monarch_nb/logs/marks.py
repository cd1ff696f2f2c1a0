"""The format of a spool: three files that a proc writes and its agent reads.

One contains Python's output, with marks that describe the text after them: its stream, its call, its time. A display is
a line of its own with a mark before it. The two others contain raw output: of C code and child processes on descriptors
1 and 2. A mark also has the sizes of those two files when it was made, so that all three can be read in the order in
which they were written.
"""

from typing import NamedTuple

SIGN = b"\x1e"  # begins a mark; never in the text, see `clean`
LONGEST = 400  # bytes of a mark, at most
TEXT, OUT, ERR = ".txt", ".out", ".err"  # suffixes of the files: Python's text, raw stdout, raw stderr
STDOUT, STDERR = 1, 2
DISPLAY = 3  # no text, but one line of a display: see monarch_nb.wire.display
NO_CALL = "-"
UNCLAIMED = "?"  # the call of raw output whose proc did not know the call


class Mark(NamedTuple):
    """Describes the text that follows, and how much raw output was there before it."""

    at: float  # wall clock, seconds
    stream: int
    level: int  # of the record of `logging`, 0 for other text
    call: str  # the call that wrote the text, "" for none
    out: int  # bytes of raw stdout written before
    err: int  # and of raw stderr
    raw_call: str  # the call of the raw output since the mark before, "" for none

    def encode(self) -> bytes:
        """Returns the mark as a line of its own."""
        words = (
            f"{self.at:.3f}",
            self.stream,
            self.level,
            self.out,
            self.err,
            self.call or NO_CALL,
            self.raw_call or NO_CALL,
        )
        return SIGN + " ".join(map(str, words)).encode("ascii", "replace") + b"\n"


BEGIN = Mark(0.0, STDOUT, 0, "", 0, 0, "")


def decode(line: bytes) -> Mark | None:
    """Returns the mark of a line without its end; None for any other line, such as one that a full disk has cut off."""
    words = line[1:].decode("ascii", "replace").split(" ")
    try:
        timestamp, stream, level, out, err, call, raw_call = ("" if word == NO_CALL else word for word in words)
        mark = Mark(float(timestamp), int(stream), int(level), call, int(out), int(err), raw_call)
    except ValueError:
        return None
    return mark if mark.stream in (STDOUT, STDERR, DISPLAY) and mark.out >= 0 and mark.err >= 0 else None


def clean(text: str) -> str:
    """Returns the text without characters that begin a mark."""
    return text.replace("\x1e", "\u241e") if "\x1e" in text else text

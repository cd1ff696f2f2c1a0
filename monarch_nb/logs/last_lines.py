"""The last output of a proc as text, for reports of its end."""

from monarch_nb.logs.marks import DISPLAY, STDOUT
from monarch_nb.logs.overwriting import left_of
from monarch_nb.logs.spool import Spool
from monarch_nb.logs.verbs import LogBlock
from monarch_nb.wire import decode_display


def plain(block: LogBlock) -> bytes:
    """Returns a block as text: for a display its text form."""
    if block.stream != DISPLAY:
        return block.data
    display = decode_display(block.data)
    return display.lines.encode("utf-8", "replace") if display is not None else b""


def last_lines(base: str, count: int, most: int) -> tuple[str, ...]:
    """Returns the last lines that a proc wrote, of at most `most` bytes; empty if they cannot be read."""
    text, stream = b"", STDOUT
    spool = Spool(base, most)
    try:
        for block in spool.take(4 * most, 0.0, all_of_it=True):
            broken = block.stream != stream and text and not text.endswith(b"\n")
            text, stream = text + (b"\n" if broken else b"") + plain(block), block.stream
    except OSError:
        pass
    finally:
        spool.close()
    lines = text.decode("utf-8", "replace").removesuffix("\n").split("\n") if text else []
    return tuple(left_of(lines)[-count:])


def spool_size(base: str) -> int:
    """Returns the bytes of a proc's output in its spool, taken or not; 0 if unknown."""
    spool = Spool(base)
    try:
        return spool.backlog
    except OSError:
        return 0
    finally:
        spool.close()

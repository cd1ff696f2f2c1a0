"""A text stream for which a full disk is no error."""

import io


class ForgivingText(io.TextIOWrapper):
    """A text stream that never raises for lack of space; what could not be written is said once something can be again.

    All below it is C: an interrupt cannot come between writing a line and knowing that it was written.
    """

    _why = ""

    def write(self, text: str, /) -> int:
        """Write what can be written."""
        try:
            if self._why:
                super().write(f"[output was lost here: {self._why}]\n")
                super().flush()
                self._why = ""
            return super().write(text)
        except OSError as error:
            self._why = error.strerror or str(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, if it can be written."""
        try:
            super().flush()
        except OSError as error:
            self._why = error.strerror or str(error)

"""Lines of meshes with a window (`aggregate_window_sec`) are held until it is over; other lines go on at once."""

from collections import deque
from collections.abc import Iterable

from monarch_nb.logs.lines import Line, lines_of
from monarch_nb.logs.options import LogOptions
from monarch_nb.logs.sources import mesh_of
from monarch_nb.logs.written import Written


class Windows:
    """Any thread may put; one at a time takes. Times are monotonic."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options
        self._new: deque[Line] = deque()
        self._held: dict[str, tuple[float, list[Line]]] = {}  # by mesh: when they are due

    def put(self, written: Iterable[Written]) -> None:
        """More lines. Does not block."""
        for lines in written:
            self._new.extend(lines_of(lines))

    def take(self, now: float, *, all_of_it: bool = False) -> tuple[list[Line], list[Line]]:
        """What is to be shown now: lines one by one, and lines of windows that are over."""
        single: list[Line] = []
        while self._new:
            line = self._new.popleft()
            option = self._options.of(line.address)
            if option is None or (option.stream is not False and not option.window):
                single.append(line)
            elif option.stream is not False and option.window:
                self._held.setdefault(mesh_of(line.address), (now + option.window, []))[1].append(line)
        due = [uid for uid, (at, _) in self._held.items() if all_of_it or at <= now]
        return single, [line for uid in due for line in self._held.pop(uid)[1]]

    def wait(self, now: float) -> float | None:
        """Seconds until the next window is over; None when nothing is held."""
        held = tuple(self._held.values())
        return max(0.0, min(at for at, _ in held) - now) if held else None

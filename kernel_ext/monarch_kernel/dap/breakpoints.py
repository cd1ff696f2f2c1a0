"""Requests about breakpoints: those of files and cells, and of exceptions."""

from monarch_nb.debug.render import FileName

from .asked import Message, Ranks
from .gutter import Gutter, More

FILTERS = [
    {
        "filter": "raised",
        "label": "Raised Exceptions",
        "description": "Stop where the code of an actor raises an exception, whether or not it is caught",
        "default": False,
        "supportsCondition": True,
    },
    {
        "filter": "uncaught",
        "label": "Uncaught Exceptions",
        "description": "Stop where an endpoint fails",
        "default": False,
        "supportsCondition": True,
    },
]


class BreakpointRequests:
    """All actors have them, those that come included, while the debugger is on."""

    def __init__(self, ranks: Ranks, gutter: Gutter, name: FileName) -> None:
        self._ranks = ranks
        self._name = name  # what people call a file
        self.gutter = gutter
        self.on = False
        self.exceptions: dict[str, str] = {}  # filter -> the ranks that it is for, "" for all

    def arm(self) -> None:
        """Has the ranks know what there is now."""
        lines = self.gutter.of_mesh() if self.on else []
        self._ranks.arm(lines, self.exceptions.get("raised"), self.exceptions.get("uncaught"))

    def switch_on(self) -> None:
        """Those that there are hold from now on."""
        self.on = True
        self.arm()

    def switch_off(self) -> None:
        """There are none any more, and what is stopped goes on first."""
        self.gutter.clear()
        self.exceptions = {}
        try:
            self._ranks.release()
        finally:
            self.on = False

    def _do_setBreakpoints(self, arguments: Message) -> Message:  # noqa: N802
        path = str((arguments.get("source") or {}).get("path") or "")
        wanted = arguments.get("breakpoints")
        if wanted is None:
            wanted = [{"line": line} for line in arguments.get("lines") or ()]
        marks = self.gutter.set(path, wanted)
        self.arm()
        return {"breakpoints": [mark.row(path) for mark in marks]}

    def _do_setExceptionBreakpoints(self, arguments: Message) -> Message:  # noqa: N802
        known = [each["filter"] for each in FILTERS]
        self.exceptions = {name: "" for name in arguments.get("filters") or () if name in known}
        for option in arguments.get("filterOptions") or ():
            if option.get("filterId") in known:
                self.exceptions[option["filterId"]] = str(option.get("condition") or "").lstrip("@")
        self.arm()
        return {}

    def _do_monarchBreakpoints(self, arguments: Message) -> Message:  # noqa: N802
        """Those that there are, with what was said of them here."""
        rows = []
        for path, mark in self.gutter:
            more = self.gutter.more(path, mark.line.number)
            told = {"condition": more.condition, "hitCondition": more.hit_condition, "log": more.log}
            rows.append({**mark.row(path), "name": f"{self._name(path)}:{mark.line.number}", **told})
        return {"breakpoints": rows}

    def _do_monarchBreakpoint(self, arguments: Message) -> Message:  # noqa: N802
        """Says more of one than a gutter can."""
        words = (str(arguments.get(name) or "") for name in ("condition", "hitCondition", "log"))
        self.gutter.add(str(arguments.get("path") or ""), int(arguments.get("line") or 0), More(*words))
        self.arm()
        return {}

"""What front ends ask of a debugger, answered by stopped ranks: the debug adapter protocol on structured commands.

No I/O: ranks, sources and the way to front ends are given. Methods block for answers of ranks, for a bounded time.
"""

from collections.abc import Callable

from monarch_nb.debug import Stopped
from monarch_nb.debug import messages as m
from monarch_nb.debug.records import Motion
from monarch_nb.debug.render import FileName, named, pick, short

from .asked import Message, Ranks, Refused
from .focus import LEAD, Focus
from .gutter import Gutter, More
from .lines import Lines
from .looking import LookRequests

_MOTIONS: dict[str, Motion] = {"continue": "continue", "next": "over", "stepIn": "in", "stepOut": "out"}
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
CAPABILITIES = {
    "supportsConfigurationDoneRequest": True,
    "supportsConditionalBreakpoints": True,
    "supportsHitConditionalBreakpoints": True,
    "supportsLogPoints": True,
    "supportsEvaluateForHovers": True,
    "supportsSetVariable": True,
    "supportsExceptionInfoRequest": True,
    "supportsModulesRequest": True,
    "supportsExceptionFilterOptions": True,
    "exceptionBreakpointFilters": FILTERS,
}


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


class Adapter:
    """One for each kernel, whichever front ends it has. `source_of` gives the text of a file or of a cell,
    `named_here` the name that front ends know it by.
    """

    def __init__(
        self,
        ranks: Ranks,
        source_of: Callable[[str], str | None],
        *,
        name: FileName = short,
        is_actor: Callable[[str], bool] = lambda cls: False,
        named_here: Callable[[str], str] = lambda file: file,
    ) -> None:
        self.ranks = ranks
        self.focus = Focus(name)
        self.gutter = Gutter(lambda path: Lines(source_of(path) or "", is_actor))
        self.breakpoints = BreakpointRequests(ranks, self.gutter, name)
        self.looking = LookRequests(ranks, self.focus, source_of, named_here)

    @property
    def attached(self) -> bool:
        """Whether a front end has its debugger on."""
        return self.breakpoints.on

    @property
    def client(self) -> str:
        """The front end, as it names itself."""
        return self.looking.client

    # -- what is asked -------------------------------------------------------------------------------------------------

    def answer(self, command: str, arguments: Message) -> Message:
        """The body of the answer. Raises Refused, and LookupError and ValueError with texts for people."""
        for part in (self, self.breakpoints, self.looking):
            method: Callable[[Message], Message] | None = getattr(part, f"_do_{command}", None)
            if method is not None:
                return method(arguments)
        raise Refused(f"the debugger of the mesh knows no request {command!r}")

    def _do_initialize(self, arguments: Message) -> Message:
        self.looking.client = str(arguments.get("clientID") or "")
        return dict(CAPABILITIES)

    def _do_attach(self, arguments: Message) -> Message:
        self.breakpoints.switch_on()
        return {}

    def _do_configurationDone(self, arguments: Message) -> Message:  # noqa: N802 - a request's name
        return {}

    def _do_disconnect(self, arguments: Message) -> Message:
        """Nothing stops any more, and everything goes on. It is off only then: a cell that waits for what is stopped
        would ask at its own prompt before.
        """
        if self.attached:
            self.breakpoints.switch_off()
        return {}

    # -- who is looked at ----------------------------------------------------------------------------------------------

    def _do_monarchThreads(self, arguments: Message) -> Message:  # noqa: N802
        """Who can be looked at: groups, with their ranks."""
        records = self.ranks.records()
        lead = self.focus.lead(records)
        rows = [
            {
                "id": each.number,
                "name": each.name,
                "ranks": [{"session": record.session, "name": named([record])} for record in each.records],
            }
            for each in self.focus.threads(records)
        ]
        return {"threads": rows, "pinned": self.focus.pinned, "lead": lead.session if lead is not None else ""}

    def _do_monarchFocus(self, arguments: Message) -> Message:  # noqa: N802
        """Looks at another rank: one by its session, or the first of those that people mean."""
        records = self.ranks.records()
        session = arguments.get("session")
        if session:
            meant = [record for record in records if record.session == session]
        else:
            meant = pick(records, str(arguments.get("ranks") or "all"))
        if not meant:
            raise Refused("that rank is not stopped any more")
        self.focus.move(meant[0], pinned=bool(arguments.get("pinned")))
        return {"lead": meant[0].session, "name": named(meant[:1])}

    def overview(self) -> Message:
        """What there is to see of stopped ranks and breakpoints beside a front end's own lists."""
        return {**self.answer("monarchThreads", {}), **self.answer("monarchBreakpoints", {})}

    # -- going on ------------------------------------------------------------------------------------------------------

    def go(self, command: str, arguments: Message) -> tuple[tuple[Stopped, ...], list[m.Answer]]:
        """Lets the ranks of a thread go on, or step; which they were, and their answers."""
        meant = self.focus.meant(self.ranks.records(), int(arguments.get("threadId") or LEAD))
        if not meant:
            raise Refused("no rank is stopped")
        by_depth: dict[int, list[Stopped]] = {}
        for record in meant:  # a step counts from the innermost frame, whichever was looked at
            by_depth.setdefault(max(0, len(record.stack) - 1), []).append(record)
        answers: dict[str, m.Answer] = {}
        for frame, records in by_depth.items():
            told = self.ranks.ask(records, m.Go(session="", motion=_MOTIONS[command], frame=frame))
            answers.update((record.session, answer) for record, answer in zip(records, told, strict=True))
        errors = [answer.error for answer in answers.values() if answer.error]
        if len(errors) == len(answers):
            raise Refused(errors[0])
        return meant, [answers[record.session] for record in meant]

    def _do_continue(self, arguments: Message) -> Message:
        self.go("continue", arguments)
        return {"allThreadsContinued": False}

    def _step(self, command: str, arguments: Message) -> Message:
        self.go(command, arguments)
        return {}

    def _do_next(self, arguments: Message) -> Message:
        return self._step("next", arguments)

    def _do_stepIn(self, arguments: Message) -> Message:  # noqa: N802
        return self._step("stepIn", arguments)

    def _do_stepOut(self, arguments: Message) -> Message:  # noqa: N802
        return self._step("stepOut", arguments)

    def _do_pause(self, arguments: Message) -> Message:
        why = self.ranks.pause()
        if why:
            raise Refused(why)
        return {}

    # -- what is told --------------------------------------------------------------------------------------------------

    def events(self) -> list[Message]:
        """What front ends have to hear after something has stopped or gone on."""
        if not self.attached:
            return []
        records = self.ranks.records()
        self.looking.handles.keep(records)
        lead = self.focus.settle(records)
        if lead is not None:
            return [stopped_event(lead)]
        if self.focus.has_gone(records):
            return [{"event": "continued", "body": {"threadId": LEAD, "allThreadsContinued": True}}]
        return []


def stopped_event(record: Stopped) -> Message:
    """That a rank has stopped, as front ends are told."""
    reason = {"exception": "exception", "failure": "exception"}.get(record.event, "")
    if not reason:
        reason = record.reason if record.reason in ("step", "pause") else "breakpoint"
    text = record.note or record.reason
    body = {"reason": reason, "threadId": LEAD, "allThreadsStopped": False, "description": text, "text": text}
    return {"event": "stopped", "body": {**body, "preserveFocusHint": False}}

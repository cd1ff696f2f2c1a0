"""Debug adapter protocol: requests of front ends, answered by stopped ranks through structured debugger commands.

No I/O: ranks, sources and the connection to front ends are passed in. Methods wait for ranks, for a bounded time.
"""

from collections.abc import Callable

from monarch_nb.debug import Stopped, verbs
from monarch_nb.debug.records import Motion
from monarch_nb.debug.render import FileName, named, pick, short

from .cluster import LEAD, ClusterRanks, Focus
from .gutter import BreakableLines, Gutter, MarkOptions
from .inspection import InspectionRequests, Message, RequestRefused

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
    """Breakpoints of the mesh. While the debugger is on, all actors have them, new actors included."""

    def __init__(self, ranks: ClusterRanks, gutter: Gutter, name: FileName) -> None:
        self._ranks = ranks
        self._name = name  # display name of a file
        self.gutter = gutter
        self.on = False
        self.exceptions: dict[str, str] = {}  # filter -> the ranks that it is for, "" for all
        self.requests: dict[str, Callable[[Message], Message]] = {
            "setBreakpoints": self._set_breakpoints,
            "setExceptionBreakpoints": self._set_exception_breakpoints,
            "monarchBreakpoints": self._monarch_breakpoints,
            "monarchBreakpoint": self._monarch_breakpoint,
        }

    def arm(self) -> None:
        """Sends the current breakpoints to the ranks."""
        lines = self.gutter.of_mesh() if self.on else []
        self._ranks.arm(lines, self.exceptions.get("raised"), self.exceptions.get("uncaught"))

    def switch_on(self) -> None:
        """Turns the debugger on and arms the breakpoints that are already set."""
        self.on = True
        self.arm()

    def switch_off(self) -> None:
        """Removes all breakpoints and resumes everything that is stopped."""
        self.gutter.clear()
        self.exceptions = {}
        try:
            self._ranks.release()
        finally:
            self.on = False

    def _set_breakpoints(self, arguments: Message) -> Message:
        path = str((arguments.get("source") or {}).get("path") or "")
        requested = arguments.get("breakpoints")
        if requested is None:
            requested = [{"line": line} for line in arguments.get("lines") or ()]
        marks = self.gutter.set(path, requested)
        self.arm()
        return {"breakpoints": [mark.row(path) for mark in marks]}

    def _set_exception_breakpoints(self, arguments: Message) -> Message:
        filters = [item["filter"] for item in FILTERS]
        self.exceptions = {name: "" for name in arguments.get("filters") or () if name in filters}
        for option in arguments.get("filterOptions") or ():
            if option.get("filterId") in filters:
                self.exceptions[option["filterId"]] = str(option.get("condition") or "").lstrip("@")
        self.arm()
        return {}

    def _monarch_breakpoints(self, arguments: Message) -> Message:
        """Returns all breakpoints, with their conditions and log messages."""
        rows = []
        for path, mark in self.gutter:
            options = self.gutter.options(path, mark.line.number)
            extras = {"condition": options.condition, "hitCondition": options.hit_condition, "log": options.log}
            rows.append({**mark.row(path), "name": f"{self._name(path)}:{mark.line.number}", **extras})
        return {"breakpoints": rows}

    def _monarch_breakpoint(self, arguments: Message) -> Message:
        """Adds a condition or a log message to a breakpoint, which the editor's gutter cannot do."""
        words = (str(arguments.get(name) or "") for name in ("condition", "hitCondition", "log"))
        self.gutter.add(str(arguments.get("path") or ""), int(arguments.get("line") or 0), MarkOptions(*words))
        self.arm()
        return {}


class Adapter:
    """The debug adapter of one kernel, shared by all its front ends. `source_of` gives the text of a file or of a cell,
    `named_here` the file name that front ends use.
    """

    def __init__(
        self,
        ranks: ClusterRanks,
        source_of: Callable[[str], str | None],
        *,
        name: FileName = short,
        is_actor: Callable[[str], bool] = lambda cls: False,
        named_here: Callable[[str], str] = lambda file: file,
    ) -> None:
        self.ranks = ranks
        self.focus = Focus(name)
        self.gutter = Gutter(lambda path: BreakableLines(source_of(path) or "", is_actor))
        self.breakpoints = BreakpointRequests(ranks, self.gutter, name)
        self.inspection = InspectionRequests(ranks, self.focus, source_of, named_here)
        own: dict[str, Callable[[Message], Message]] = {
            "initialize": self._initialize,
            "attach": self._attach,
            "configurationDone": self._configuration_done,
            "disconnect": self._disconnect,
            "monarchThreads": self._monarch_threads,
            "monarchFocus": self._monarch_focus,
            "continue": self._continue,
            "next": self._next,
            "stepIn": self._step_in,
            "stepOut": self._step_out,
            "pause": self._pause,
        }
        self._requests = own | self.breakpoints.requests | self.inspection.requests

    @property
    def attached(self) -> bool:
        """True while a front end has its debugger on."""
        return self.breakpoints.on

    @property
    def client(self) -> str:
        """Client id of the front end, as sent in `initialize`."""
        return self.inspection.client

    # -- requests ------------------------------------------------------------------------------------------------------

    def answer(self, command: str, arguments: Message) -> Message:
        """Body of the response. Raises RequestRefused, LookupError and ValueError with texts for people."""
        method = self._requests.get(command)
        if method is None:
            raise RequestRefused(f"the debugger of the mesh does not support the request {command!r}")
        return method(arguments)

    def _initialize(self, arguments: Message) -> Message:
        self.inspection.client = str(arguments.get("clientID") or "")
        return dict(CAPABILITIES)

    def _attach(self, arguments: Message) -> Message:
        self.breakpoints.switch_on()
        return {}

    def _configuration_done(self, arguments: Message) -> Message:
        return {}

    def _disconnect(self, arguments: Message) -> Message:
        """Removes breakpoints and resumes all ranks. `attached` turns false only then: before that, a cell that
        waits for a stopped rank would open its own prompt.
        """
        if self.attached:
            self.breakpoints.switch_off()
        return {}

    # -- focus ---------------------------------------------------------------------------------------------------------

    def _monarch_threads(self, arguments: Message) -> Message:
        """Groups of stopped ranks that can be selected, with their ranks."""
        records = self.ranks.records()
        lead = self.focus.lead(records)
        rows = [
            {
                "id": thread.number,
                "name": thread.name,
                "ranks": [{"session": record.session, "name": named([record])} for record in thread.records],
            }
            for thread in self.focus.threads(records)
        ]
        return {"threads": rows, "pinned": self.focus.pinned, "lead": lead.session if lead is not None else ""}

    def _monarch_focus(self, arguments: Message) -> Message:
        """Moves the focus to another rank: by its session, or to the first of the ranks that `ranks` selects."""
        records = self.ranks.records()
        session = arguments.get("session")
        if session:
            targets = [record for record in records if record.session == session]
        else:
            targets = pick(records, str(arguments.get("ranks") or "all"))
        if not targets:
            raise RequestRefused("that rank is not stopped any more")
        self.focus.move(targets[0], pinned=bool(arguments.get("pinned")))
        return {"lead": targets[0].session, "name": named(targets[:1])}

    def overview(self) -> Message:
        """State of stopped ranks and breakpoints that a front end's own lists do not show."""
        return {**self.answer("monarchThreads", {}), **self.answer("monarchBreakpoints", {})}

    # -- resuming ------------------------------------------------------------------------------------------------------

    def go(self, command: str, arguments: Message) -> tuple[tuple[Stopped, ...], list[verbs.CommandAnswer]]:
        """Resumes or steps the ranks of a thread; returns these ranks and their answers."""
        targets = self.focus.targets(self.ranks.records(), int(arguments.get("threadId") or LEAD))
        if not targets:
            raise RequestRefused("no rank is stopped")
        by_depth: dict[int, list[Stopped]] = {}
        for record in targets:  # a step counts from the innermost frame, whichever is selected
            by_depth.setdefault(max(0, len(record.stack) - 1), []).append(record)
        answers: dict[str, verbs.CommandAnswer] = {}
        for frame, records in by_depth.items():
            replies = self.ranks.ask(records, verbs.Go(session="", motion=_MOTIONS[command], frame=frame))
            answers.update((record.session, answer) for record, answer in zip(records, replies, strict=True))
        errors = [answer.error for answer in answers.values() if answer.error]
        if len(errors) == len(answers):
            raise RequestRefused(errors[0])
        return targets, [answers[record.session] for record in targets]

    def _continue(self, arguments: Message) -> Message:
        self.go("continue", arguments)
        return {"allThreadsContinued": False}

    def _step(self, command: str, arguments: Message) -> Message:
        self.go(command, arguments)
        return {}

    def _next(self, arguments: Message) -> Message:
        return self._step("next", arguments)

    def _step_in(self, arguments: Message) -> Message:
        return self._step("stepIn", arguments)

    def _step_out(self, arguments: Message) -> Message:
        return self._step("stepOut", arguments)

    def _pause(self, arguments: Message) -> Message:
        reason = self.ranks.pause()
        if reason:
            raise RequestRefused(reason)
        return {}

    # -- events --------------------------------------------------------------------------------------------------------

    def events(self) -> list[Message]:
        """Events to send to front ends after a rank has stopped or resumed."""
        if not self.attached:
            return []
        records = self.ranks.records()
        self.inspection.handles.keep(records)
        lead = self.focus.settle(records)
        if lead is not None:
            return [stopped_event(lead)]
        if self.focus.has_resumed(records):
            return [{"event": "continued", "body": {"threadId": LEAD, "allThreadsContinued": True}}]
        return []


def stopped_event(record: Stopped) -> Message:
    """Returns the DAP `stopped` event for a rank."""
    reason = {"exception": "exception", "failure": "exception"}.get(record.event, "")
    if not reason:
        reason = record.reason if record.reason in ("step", "pause") else "breakpoint"
    text = record.note or record.reason
    body = {"reason": reason, "threadId": LEAD, "allThreadsStopped": False, "description": text, "text": text}
    return {"event": "stopped", "body": {**body, "preserveFocusHint": False}}

"""What is typed at the prompt, or written in a `%%mdb` cell: read, sent to the ranks in focus, answered in one text."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_nb.debug.control import whereabouts
from monarch_nb.debug.control.controller import STEP_S, Controller
from monarch_nb.debug.errors import DebugError
from monarch_nb.debug.records import Stopped, Value
from monarch_nb.debug.render.groups import FileName, grouped, named, short, tree, tree_text
from monarch_nb.debug.render.merge import Pair, diff_text, merged_text, plain, watch_text, who
from monarch_nb.debug.render.picks import pick
from monarch_nb.debug.render.table import source_lines, table_text

HELP = """\
The ranks in focus take all commands of pdb:
  n s r c u d w l ll p pp a j b tbreak cl cond display until, !statement, and plain Python
For many ranks at once:
  focus 3 | gpus=0:4 | all   choose the ranks that commands go to; `@gpus=3 p x` for one command
  ranks                      the table of stopped ranks
  where                      one tree of all stacks, with counts
  diff EXPR                  the value of EXPR by rank, the most unusual first
  watch EXPR | unwatch       a small chart of EXPR over the ranks, at each stop
  stack                      the stacks of ranks that run
Leaving:
  c [all]                    continue (all: also the ranks that are not in focus)
  detach                     leave the ranks stopped and end the cell; %mdb and %%mdb work with them later
  quit                       end the endpoints: the call fails
  interact                   type lines of Python until `exit`"""

_ENTRY = re.compile(r"^([> ] )(\S.*)\((\d+)\)([\w<>.]+)\(\)(?:->.*)?$", re.MULTILINE)  # > file(line)function()
AGAIN_S = 0.1  # for those that go on to stop again, before it is said that they do
_GO_ON = frozenset(("c", "cont", "continue"))
_QUIT = frozenset(("q", "quit", "exit", "EOF"))


@dataclass(frozen=True)
class Result:
    """What came of one command: the text that is shown, and by rank what each has answered."""

    command: str
    text: str
    pairs: tuple[Pair, ...] = ()

    @property
    def values(self) -> dict[int, Any]:
        """By rank, the value: numbers as numbers, else as text. None where there was none."""
        return {record.rank: plain(answer.value) for record, answer in self.pairs}

    @property
    def summaries(self) -> dict[int, Value | None]:
        """By rank, all that is known of the value: its type, of tensors the shape, extremes and NaN count."""
        return {record.rank: answer.value for record, answer in self.pairs}

    @property
    def errors(self) -> dict[int, str]:
        """By rank, what went wrong."""
        return {record.rank: answer.error for record, answer in self.pairs if answer.error}

    def __str__(self) -> str:
        return self.text


@dataclass
class Desk:
    """A place to debug from: who is in focus, what is watched. `candidates` are the sessions that belong here."""

    controller: Controller
    candidates: Callable[[], list[Stopped]]
    name: FileName = short
    focus: set[tuple[str, int, str]] | None = None  # None: the largest group
    watches: list[str] = field(default_factory=list)
    displays: list[str] = field(default_factory=list)
    interactive: bool = False  # lines are Python, not commands
    everybody: bool = False  # without a focus commands go to all, not to the largest group
    leave: str = ""  # why the desk is to be left: "detach"
    step_s: float = STEP_S

    # -- who ----------------------------------------------------------------------------------------------------------

    def focused(self) -> list[Stopped]:
        """The sessions that commands go to; those in focus that are stopped, or the largest group."""
        every = self.candidates()
        if self.focus is not None:
            found = [one for one in every if _key(one) in self.focus]
            if found:
                return found
        groups = grouped(every)
        if self.everybody:
            return every
        return list(max(groups, key=lambda group: len(group.records)).records) if groups else []

    def fix(self) -> list[Stopped]:
        """The sessions in focus, which stay in focus wherever they go from here."""
        found = self.focused()
        if self.focus is None or not any(_key(one) in self.focus for one in found):
            self.focus = {_key(one) for one in found}
        return found

    @property
    def prompt(self) -> str:
        """`mdb trainers[gpus=0-6]> `."""
        found = self.focused()
        if not found:
            return "mdb> "
        meshes = {one.mesh for one in found}
        label = f"{found[0].name}[{who(found, found)}]" if len(meshes) == 1 else named(found)
        label = label.replace("[]", "")
        return f"mdb {label}{' >>>' if self.interactive else '>'} "

    # -- doing --------------------------------------------------------------------------------------------------------

    def do(self, line: str) -> Result:
        """Carries one command out. Never raises for what a command says or does wrong: the text tells."""
        text = line.rstrip()
        try:
            if self.interactive and text.strip() in ("exit", "exit()", "quit()"):
                self.interactive = False
                return Result(line, "You type commands of the debugger again.")
            if text.lstrip().startswith("@"):
                return self._once(text.lstrip())
            return self._do(text)
        except (DebugError, ValueError) as error:
            return Result(line, f"*** {error}")

    def _once(self, text: str) -> Result:
        picked, _, rest = text[1:].strip().partition(" ")
        before = self.focus
        self.focus = {_key(one) for one in pick(self.candidates(), picked)}
        try:
            return self._do(rest)
        finally:
            self.focus = before

    def _do(self, text: str) -> Result:
        if not text.strip():
            return Result(text, "")
        word, _, rest = text.strip().partition(" ")
        rest = rest.strip()
        own = None if self.interactive or "\n" in text else getattr(self, f"_do_{word}", None)
        if own is not None and not re.match(r"(=|[-+*/%&|^<>]=?|\.|\()", rest):  # `where = 3` is Python
            told: Result = own(rest)
            return told
        found = self.fix()
        if not found:
            return Result(text, "*** nothing is stopped")
        if word in _GO_ON and not self.interactive:
            return self._go_on(text, found, everybody=rest == "all")
        if word in _QUIT and not self.interactive:
            return self._pairs(text, found, self.controller.ask(found, "quit"))
        sent = f"!{text}" if self.interactive or "\n" in text else text
        answers = self.controller.step(found, sent, self.step_s)
        result = self._pairs(text, found, answers)
        if any(answer.resumed for answer in answers):
            return Result(text, "\n".join(part for part in (result.text, self.after(found)) if part), result.pairs)
        return result

    def _pairs(self, text: str, found: Sequence[Stopped], answers: Sequence[Any]) -> Result:
        pairs = tuple(zip(found, answers, strict=True))
        told = _ENTRY.sub(self._entry, merged_text(pairs))
        for file in {frame.file for one in found for frame in one.stack}:
            if self.name(file) != short(file):  # a cell, whose file nobody knows by its name
                told = told.replace(file, self.name(file))
        return Result(text, told, pairs)

    def _entry(self, match: re.Match[str]) -> str:
        """A line of pdb's own stacks, with the name that people know the file by."""
        return f"{match[1]}{self.name(match[2])}:{match[3]} in {match[4]}"

    def _go_on(self, text: str, found: list[Stopped], *, everybody: bool) -> Result:
        going = self.candidates() if everybody else found
        answers = self.controller.ask(going, "resume")
        ids = {one.session for one in going}
        self.controller.book.wait(AGAIN_S, lambda: ids <= {one.session for one in self.candidates()})
        again = [one for one in self.candidates() if one.session in ids]
        left = [one for one in self.candidates() if one.session not in ids]
        if everybody or not (left or again):
            self.focus = None
        told = f"{named(going)} {'goes' if len(going) == 1 else 'go'} on"
        if left:
            told += f"; still stopped: {named(left)}"
        pairs = tuple(zip(going, answers, strict=True))
        return Result(text, f"{told}, and stopped again:\n{self.after(again)}" if again else told, pairs)

    def after(self, before: Sequence[Stopped]) -> str:
        """Where those are that were let go by a step."""
        now = {one.session: one for one in self.controller.book.sessions()}
        stopped = [now[one.session] for one in before if one.session in now]
        lines = []
        for group in grouped(stopped):
            first = group.first
            label = f"{who(group.records, before)}  " if len(stopped) < len(before) or len(before) > 1 else ""
            told = f"{self.name(first.frame.file)}:{first.frame.line} in {first.frame.function}"
            lines.append(f"{label}{told}  → {first.frame.text}")
            if first.note:
                lines.append(f"    {first.note}")
        running = [one for one in before if one.session not in now]
        ended = [one for one in running if self.controller.book.why_over(one.session)]
        still = [one for one in running if one not in ended]
        for why in dict.fromkeys(self.controller.book.why_over(one.session) for one in ended):
            those = [one for one in ended if self.controller.book.why_over(one.session) == why]
            lines.append(f"{named(those)}: {why}")
        if still:
            lines.append(f"{named(still)}: it runs, and has not stopped again yet" if len(still) == 1 else
                         f"{named(still)}: they run, and have not stopped again yet")  # fmt: skip
        return "\n".join([*lines, *self.watched()])

    def watched(self) -> list[str]:
        """What is displayed, by rank, and the sparklines of what is watched."""
        if not self.candidates():
            return []
        found = [self._display(expression).text for expression in self.displays]
        return found + [self._watch(expression).text for expression in self.watches]

    # -- commands of ours ---------------------------------------------------------------------------------------------

    def _do_help(self, rest: str) -> Result:
        return Result("help", HELP) if not rest else self._pdb_help(rest)

    _do_h = _do_help

    def _pdb_help(self, rest: str) -> Result:
        found = self.focused()[:1]
        return self._pairs(f"help {rest}", found, self.controller.ask(found, "pdb", f"help {rest}"))

    def _do_focus(self, rest: str) -> Result:
        every = self.candidates()
        if rest:
            found = every if rest == "all" else pick(every, rest)
            self.focus = {_key(one) for one in found}
        found = self.focused()
        if not found:
            return Result("focus", "nothing is stopped")
        lines = [f"{named(found)}: {self.name(g.first.frame.file)}:{g.first.frame.line}" for g in grouped(found)[:1]]
        return Result("focus", "\n".join([*lines, *source_lines(grouped(found)[0].first)]) if rest else lines[0])

    def table(self, *, source: bool = True) -> str:
        """What is stopped, who is not and where those are."""
        records = self.candidates()
        sizes, missing = whereabouts.missing(self.controller, records, self.name)
        return table_text(records, sizes=sizes, missing=missing, name=self.name, source=source)

    def _do_ranks(self, rest: str) -> Result:
        return Result("ranks", self.table(source=False))

    def _do_where(self, rest: str) -> Result:
        records = self.candidates()
        by_id = {one.session: one for one in records}
        nodes = tree((one.session, one.stack) for one in records)
        lines = tree_text(nodes, lambda ids: named([by_id[each] for each in ids]), self.name)
        return Result("where", "\n".join(lines) or "nothing is stopped")

    def _do_diff(self, rest: str) -> Result:
        return self._over_all("diff", rest, diff_text)

    def _do_watch(self, rest: str) -> Result:
        if not rest:
            return Result("watch", "\n".join(self.watched()) or "no expression is watched: type watch EXPR")
        if rest not in self.watches:
            self.watches.append(rest)
        return self._watch(rest)

    def _watch(self, expression: str) -> Result:
        return self._over_all("watch", expression, watch_text)

    def _do_display(self, rest: str) -> Result:
        if not rest:
            return Result(
                "display",
                "\n".join(map(self._displayed, self.displays)) or "no expression is displayed: type display EXPR",
            )
        if rest not in self.displays:
            self.displays.append(rest)
        return self._display(rest)

    def _displayed(self, expression: str) -> str:
        return self._display(expression).text

    def _display(self, expression: str) -> Result:
        found = self.focused()
        pairs = tuple(zip(found, self.controller.ask(found, "eval", expression), strict=True))
        text = merged_text(pairs)
        between = "\n" if "\n" in text else " "
        return Result(f"display {expression}", f"{expression}:{between}{text}", pairs)

    def _do_undisplay(self, rest: str) -> Result:
        self.displays = [each for each in self.displays if rest and each != rest]
        return Result("undisplay", f"displayed: {', '.join(self.displays) or 'nothing'}")

    def _do_unwatch(self, rest: str) -> Result:
        self.watches = [each for each in self.watches if rest and each != rest]
        return Result("unwatch", f"watched: {', '.join(self.watches) or 'nothing'}")

    def _over_all(self, command: str, expression: str, text: Callable[[str, Sequence[Pair]], str]) -> Result:
        if not expression:
            return Result(command, f"*** {command} needs an expression: write {command} loss")
        found = self.candidates()
        if not found:
            return Result(command, "*** nothing is stopped")
        pairs = tuple(zip(found, self.controller.ask(found, "eval", expression), strict=True))
        return Result(f"{command} {expression}", text(expression, pairs), pairs)

    def _do_locals(self, rest: str) -> Result:
        found = self.fix()
        return self._pairs(f"locals {rest}".strip(), found, self.controller.ask(found, "locals", rest))

    def _do_stack(self, rest: str) -> Result:
        return Result("stack", whereabouts.running_text(self.controller, self.candidates(), self.name))

    def _do_detach(self, rest: str) -> Result:
        self.leave = "detach"
        return Result(
            "detach", f"{named(self.candidates())}: left stopped. %mdb lists them, and %%mdb NAME gives them commands"
        )

    def _do_interact(self, rest: str) -> Result:
        self.interactive = True
        return Result(
            "interact", "You type Python for the ranks in focus now; `exit` returns to commands of the debugger."
        )


def _key(one: Stopped) -> tuple[str, int, str]:
    return one.mesh, one.rank, one.thread

"""Commands of the prompt or of a `%%mdb` cell: read, sent to the ranks in focus, answered in one text."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from monarch_nb.debug import verbs
from monarch_nb.debug.control import whereabouts
from monarch_nb.debug.control.controller import STEP_S, Controller
from monarch_nb.debug.records import DebugError, Motion, Stopped
from monarch_nb.debug.render.groups import (
    FileName,
    grouped,
    named,
    pick,
    short,
    source_lines,
    table_text,
    tree,
    tree_text,
)
from monarch_nb.debug.render.merge import Answers, Pair, diff_text, merged_text, ranks_text, watch_text

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
  quit                       end the endpoints: the call fails; a thread that an endpoint has started ends alone
  interact                   type lines of Python until `exit`"""

_ENTRY = re.compile(r"^([> ] )(\S.*)\((\d+)\)([\w<>.]+)\(\)(?:->.*)?$", re.MULTILINE)  # > file(line)function()
AGAIN_S = 0.1  # for resumed ranks to stop again, before they are reported as running
_GO_ON = frozenset(("c", "cont", "continue"))
_QUIT = frozenset(("q", "quit", "exit", "EOF"))
_MOTIONS: dict[str, Motion] = {
    "s": "in",
    "step": "in",
    "n": "over",
    "next": "over",
    "r": "out",
    "return": "out",
    "unt": "until",
    "until": "until",
}
_WORDS: dict[Motion, str] = {"continue": "continue", "in": "step", "over": "next", "out": "return", "until": "until"}


@dataclass
class DebugPrompt:
    """The state of a prompt: its focus and watched expressions. `candidates` returns the sessions it is for."""

    controller: Controller
    candidates: Callable[[], list[Stopped]]
    name: FileName = short
    focus: set[tuple[str, int, str]] | None = None  # None: the largest group
    chosen: bool = False  # by a person, and not by being the largest group
    watches: list[str] = field(default_factory=list)
    displays: list[str] = field(default_factory=list)
    interactive: bool = False  # lines are Python, not commands
    everybody: bool = False  # without a focus commands go to all, not to the largest group
    leave: Literal["", "detach"] = ""  # the command that leaves the prompt
    step_s: float = STEP_S

    # -- focus --------------------------------------------------------------------------------------------------------

    def focused(self) -> list[Stopped]:
        """Returns the sessions that receive commands: stopped ones in focus, or the largest group."""
        every = self.candidates()
        if self.focus is not None:
            records = [record for record in every if _key(record) in self.focus]
            if records:
                return records
        groups = grouped(every)
        if self.everybody:
            return every
        return list(max(groups, key=lambda group: group.ranks).records) if groups else []

    def focus_on(self, records: Sequence[Stopped], *, chosen: bool = True) -> None:
        """Sends further commands to these, wherever they stop."""
        self.focus, self.chosen = {_key(record) for record in records}, chosen

    def gather(self) -> None:
        """Adds the ranks that have stopped at the line of the focus to it, unless a person chose the focus."""
        if self.focus is not None and not self.chosen:
            records = set(self.focused())
            groups = grouped(self.candidates())
            self.focus |= {_key(record) for group in groups if records & set(group.records) for record in group.records}

    def fix(self) -> list[Stopped]:
        """Returns the sessions in focus, which from now on stay in focus wherever they stop."""
        records = self.focused()
        if self.focus is None or not any(_key(record) in self.focus for record in records):
            self.focus_on(records, chosen=False)
        return records

    @property
    def question(self) -> str:
        """`mdb trainers[gpus=0-6]> `."""
        records = self.focused()
        if not records:
            return "mdb> "
        meshes = {record.mesh for record in records}
        label = f"{records[0].name}[{ranks_text(records, records)}]" if len(meshes) == 1 else named(records)
        label = label.replace("[]", "")
        return f"mdb {label}{' >>>' if self.interactive else '>'} "

    # -- doing --------------------------------------------------------------------------------------------------------

    def do(self, line: str) -> Answers:
        """Carries out one command. Never raises for a wrong command: the text has the error."""
        text = line.rstrip()
        try:
            if self.interactive and text.strip() in ("exit", "exit()", "quit()"):
                self.interactive = False
                return Answers(line, "You type commands of the debugger again.")
            if text.lstrip().startswith("@"):
                return self._once(text.lstrip())
            return self._do(text)
        except (DebugError, ValueError) as error:
            return Answers(line, f"*** {error}")

    def _once(self, text: str) -> Answers:
        picked, _, rest = text[1:].strip().partition(" ")
        before = self.focus, self.chosen
        self.focus_on(pick(self.candidates(), picked))
        try:
            return self._do(rest)
        finally:
            self.focus, self.chosen = before

    def _do(self, text: str) -> Answers:
        if not text.strip():
            return Answers(text, "")
        word, _, rest = text.strip().partition(" ")
        rest = rest.strip()
        python = self.interactive or "\n" in text
        own: Callable[[str], Answers] | None = None if python else getattr(self, f"_do_{word}", None)
        if own is not None and not re.match(r"(=|[-+*/%&|^<>]=?|\.|\()", rest):  # `where = 3` is Python
            return own(rest)
        records = self.fix()
        if not records:
            return Answers(text, "*** nothing is stopped")
        if word in _GO_ON and not self.interactive:
            return self._go_on(text, records, everybody=rest == "all")
        if word in _QUIT and not self.interactive:
            return self._paired(text, records, self.controller.ask(records, verbs.Quit(session="")))
        command = verbs.Evaluate(session="", text=text, statement=True) if python else _command(word, rest, text)
        return self._sent(text, records, command)

    def _sent(self, text: str, records: list[Stopped], command: verbs.Command) -> Answers:
        """Sends a command; waits for the end of steps."""
        answers = self.controller.ask(records, command)
        self.controller.await_stops(records, answers, self.step_s)
        result = self._paired(text, records, answers)
        if not any(answer.resumed for answer in answers):
            return result
        parts = (result.text, self.after(records))
        return Answers(text, "\n".join(part for part in parts if part), result.pairs)

    def move(self, motion: Motion, line: int | None = None) -> Answers:
        """Steps the ranks in focus; returns their new locations."""
        records = self.fix()
        if not records:
            return Answers(_WORDS[motion], "*** nothing is stopped")
        return self._sent(_WORDS[motion], records, verbs.Go(session="", motion=motion, line=line))

    def _paired(self, text: str, records: Sequence[Stopped], answers: Sequence[verbs.CommandAnswer]) -> Answers:
        pairs = tuple(zip(records, answers, strict=True))
        shown = _ENTRY.sub(self._entry, merged_text(pairs))
        for file in {frame.file for record in records for frame in record.stack}:
            if self.name(file) != short(file):  # a cell, whose file name means nothing to people
                shown = shown.replace(file, self.name(file))
        return Answers(text, shown, pairs)

    def _entry(self, match: re.Match[str]) -> str:
        """Returns a line of pdb's own stacks, with the display name of the file."""
        return f"{match[1]}{self.name(match[2])}:{match[3]} in {match[4]}"

    def _go_on(self, text: str, records: list[Stopped], *, everybody: bool) -> Answers:
        going = self.candidates() if everybody else records
        answers = self.controller.go(going)
        sessions = {record.session for record in going}
        self.controller.stopped.wait(AGAIN_S, lambda: sessions <= {record.session for record in self.candidates()})
        again = [record for record in self.candidates() if record.session in sessions]
        remaining = [record for record in self.candidates() if record.session not in sessions]
        if everybody or not (remaining or again):
            self.focus = None
        went = f"{named(going)} {'goes' if len(going) == 1 else 'go'} on"
        if remaining:
            went += f"; still stopped: {named(remaining)}"
        pairs = tuple(zip(going, answers, strict=True))
        return Answers(text, f"{went}, and stopped again:\n{self.after(again)}" if again else went, pairs)

    def after(self, before: Sequence[Stopped]) -> str:
        """New locations of ranks that were stepped, and watched values."""
        stopped = self.controller.stopped
        return "\n".join([_moves_text(before, stopped.records(), stopped.end_reason, self.name), *self.watched()])

    def watched(self) -> list[str]:
        """Displayed values by rank, and sparklines of watched ones."""
        if not self.candidates():
            return []
        shown = [self._display(expression).text for expression in self.displays]
        return shown + [self._watch(expression).text for expression in self.watches]

    # -- commands of the prompt's own ----------------------------------------------------------------------------------

    def _do_help(self, rest: str) -> Answers:
        if not rest:
            return Answers("help", HELP)
        records = self.focused()[:1]
        text = f"help {rest}"
        return self._paired(text, records, self.controller.ask(records, verbs.Pdb(session="", text=text)))

    _do_h = _do_help

    def _do_focus(self, rest: str) -> Answers:
        every = self.candidates()
        if rest:
            self.focus_on(every if rest == "all" else pick(every, rest))
        records = self.focused()
        if not records:
            return Answers("focus", "nothing is stopped")
        first = grouped(records)[0].first
        line = f"{named(records)}: {self.name(first.frame.file)}:{first.frame.line}"
        return Answers("focus", "\n".join([line, *source_lines(first)]) if rest else line)

    def table(self, *, source: bool = True) -> str:
        """Returns the stopped ranks, the other ranks and their locations."""
        records = self.candidates()
        sizes, missing = whereabouts.missing(self.controller, records, self.name)
        return table_text(records, sizes=sizes, missing=missing, name=self.name, source=source)

    def _do_ranks(self, rest: str) -> Answers:
        return Answers("ranks", self.table(source=False))

    def _do_where(self, rest: str) -> Answers:
        records = self.candidates()
        by_id = {record.session: record for record in records}
        nodes = tree((record.session, record.stack) for record in records)
        lines = tree_text(nodes, lambda ids: named([by_id[rank_id] for rank_id in ids]), self.name)
        return Answers("where", "\n".join(lines) or "nothing is stopped")

    def _do_diff(self, rest: str) -> Answers:
        return self._over_all("diff", rest, diff_text)

    def _do_watch(self, rest: str) -> Answers:
        if not rest:
            return Answers("watch", "\n".join(self.watched()) or "no expression is watched: type watch EXPR")
        if rest not in self.watches:
            self.watches.append(rest)
        return self._watch(rest)

    def _watch(self, expression: str) -> Answers:
        return self._over_all("watch", expression, watch_text)

    def _do_display(self, rest: str) -> Answers:
        if not rest:
            shown = [self._display(expression).text for expression in self.displays]
            return Answers("display", "\n".join(shown) or "no expression is displayed: type display EXPR")
        if rest not in self.displays:
            self.displays.append(rest)
        return self._display(rest)

    def _display(self, expression: str) -> Answers:
        records = self.focused()
        pairs = tuple(zip(records, self.controller.evaluate(records, expression), strict=True))
        text = merged_text(pairs)
        between = "\n" if "\n" in text else " "
        return Answers(f"display {expression}", f"{expression}:{between}{text}", pairs)

    def _do_undisplay(self, rest: str) -> Answers:
        self.displays = [expression for expression in self.displays if rest and expression != rest]
        return Answers("undisplay", f"displayed: {', '.join(self.displays) or 'nothing'}")

    def _do_unwatch(self, rest: str) -> Answers:
        self.watches = [expression for expression in self.watches if rest and expression != rest]
        return Answers("unwatch", f"watched: {', '.join(self.watches) or 'nothing'}")

    def _over_all(self, command: str, expression: str, text: Callable[[str, Sequence[Pair]], str]) -> Answers:
        if not expression:
            return Answers(command, f"*** {command} needs an expression: write {command} loss")
        records = self.candidates()
        if not records:
            return Answers(command, "*** nothing is stopped")
        pairs = tuple(zip(records, self.controller.evaluate(records, expression), strict=True))
        return Answers(f"{command} {expression}", text(expression, pairs), pairs)

    def _do_locals(self, rest: str) -> Answers:
        records = self.fix()
        names = tuple(rest.split())
        answers = self.controller.ask(records, verbs.GetVariables(session="", names=names))
        return self._paired(f"locals {rest}".strip(), records, answers)

    def _do_stack(self, rest: str) -> Answers:
        return Answers("stack", whereabouts.running_text(self.controller, self.candidates(), self.name))

    def _do_detach(self, rest: str) -> Answers:
        self.leave = "detach"
        records = named(self.candidates())
        return Answers("detach", f"{records}: left stopped. %mdb lists them, and %%mdb NAME gives them commands")

    def _do_interact(self, rest: str) -> Answers:
        self.interactive = True
        how = "You type Python for the ranks in focus now; `exit` returns to commands of the debugger."
        return Answers("interact", how)


def _command(word: str, rest: str, text: str) -> verbs.Command:
    """Returns the command of a line: steps and values have their own commands, all other lines are pdb's."""
    if ";;" not in text:
        motion = _MOTIONS.get(word)
        if motion == "until" and rest.isdecimal():
            return verbs.Go(session="", motion=motion, line=int(rest))
        if motion is not None and not (motion == "until" and rest):
            return verbs.Go(session="", motion=motion)
        if word in ("p", "pp") and rest:
            return verbs.Evaluate(session="", text=rest, much=word == "pp")
        if text[:1] == "!":
            return verbs.Evaluate(session="", text=text[1:], statement=True)
    return verbs.Pdb(session="", text=text)


def _key(record: Stopped) -> tuple[str, int, str]:
    return record.mesh, record.rank, record.thread


def _moves_text(
    before: Sequence[Stopped], now: Sequence[Stopped], end_reason: Callable[[str], str], name: FileName = short
) -> str:
    """Returns a line for each new location, for ranks whose endpoint has ended, and for ranks that still run.

    `now` are all stopped ranks; `end_reason(session)` is the reason why a session cannot stop again, "" if it can.
    """
    by_session = {record.session: record for record in now}
    stopped = [by_session[record.session] for record in before if record.session in by_session]
    lines = []
    for group in grouped(stopped):
        first = group.first
        label = f"{ranks_text(group.records, before)}  " if len(stopped) < len(before) or len(before) > 1 else ""
        lines.append(
            f"{label}{name(first.frame.file)}:{first.frame.line} in {first.frame.function}  → {first.frame.text}"
        )
        if first.note:
            lines.append(f"    {first.note}")
    running = [record for record in before if record.session not in by_session]
    ended: dict[str, list[Stopped]] = {}
    for record in running:
        ended.setdefault(end_reason(record.session), []).append(record)
    still = ended.pop("", [])
    lines += [f"{named(records)}: {reason}" for reason, records in ended.items()]
    if still:
        clause = "it runs, and has" if len(still) == 1 else "they run, and have"
        lines.append(f"{named(still)}: {clause} not stopped again yet")
    return "\n".join(lines)

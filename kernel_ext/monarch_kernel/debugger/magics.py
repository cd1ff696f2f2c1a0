"""The debugger's magics: each reads its line and calls the library; and their results: text to read, data to use."""

import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import line_cell_magic, line_magic, magics_class, no_var_expand

from monarch_nb import debug
from monarch_nb.debug import Answers, DebugError
from monarch_nb.debug.prompt import DebugPrompt, NoPrompt, WaitPrompt, converse
from monarch_nb.debug.render import named
from monarch_nb.debug.reproduce import SKIPPED
from monarch_nb.mesh import ActorMesh, state_of
from monarch_nb.wire import ActorError, kind_of

from ..arguments import check_options, read_names, read_place
from ..completion import LineCompletion
from ..jupyter import cell_name, give_back_underscores, line_magic_of
from ..session import Session, SessionMagics

_BREAK = re.compile(r"(?P<location>\S+)(?:\s+if\s+(?P<condition>.+?))?\s+on\s+(?P<mesh>[^\d\W].*)", re.DOTALL)
REPRODUCE_OPTIONS = ("--step", "--rank", "--limit")
_BYTES = re.compile(r"(\d+)([KMG]?)(i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Listing:
    """A text that is shown unchanged."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class StoppedTable(Listing):
    """The stopped ranks at the time of its creation; live where widgets are."""


class CellResults(Sequence[Answers]):
    """Results of the commands of a cell, in order; `values` are those of the last command that had any."""

    def __init__(self, results: Sequence[Answers]) -> None:
        self._results = list(results)

    @overload
    def __getitem__(self, index: int) -> Answers: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Answers]: ...
    def __getitem__(self, index: int | slice) -> Answers | Sequence[Answers]:
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[Answers]:
        return iter(self._results)

    @property
    def values(self) -> dict[int, Any]:
        """Values by rank of the last command that had any."""
        for result in reversed(self._results):
            if any(answer.value is not None for _, answer in result.pairs):
                return result.values
        return {}

    def __repr__(self) -> str:
        parts = [f"» {answers.command.rstrip()}\n{answers.text}".rstrip() for answers in self._results]
        return "\n".join(parts) or "no commands"


class _ReproduceArguments(NamedTuple):
    name: str = ""
    step: bool = False
    options: tuple[tuple[str, int], ...] = ()  # of `ActorError.reproduce`


def _read_reproduce(line: str) -> _ReproduceArguments:
    """Reads the line of %reproduce. Raises UsageError."""
    names, options = list[str](), dict[str, int]()
    words = iter(line.split())
    step = False
    for word in words:
        if not word.startswith("-"):
            names.append(word)
            continue
        check_options("%reproduce", {word}, set(REPRODUCE_OPTIONS))
        if word == "--step":
            step = True
            continue
        number = _BYTES.fullmatch(value := next(words, ""))
        if number is None:
            example = "the number of a rank, such as 3" if word == "--rank" else "a number of bytes, such as 512M or 2G"
            raise UsageError(f"%reproduce {word} {value}: write {example}")
        options[word.removeprefix("--")] = int(number[1]) * _UNITS[number[2].upper()]
    if len(names) > 1:
        raise UsageError("%reproduce takes the name of one error, or none")
    return _ReproduceArguments("".join(names), step, tuple(options.items()))


class DebugCompletion(LineCompletion):
    """On the lines of the debugger's magics."""

    magics = ("%%mdb", "%break", "%mpm", "%reproduce", "%stacks", "%freeze")

    def candidates(self, magic: str, before: list[str]) -> list[str]:
        """Words that can follow `before` on the line of a magic."""
        if magic == "%break":
            return self._break(before)
        if magic == "%reproduce":
            values = self._shell.user_ns.items()
            errors = [name for name, value in values if isinstance(value, ActorError) and not name.startswith("_")]
            return [*([] if before else errors), *(option for option in REPRODUCE_OPTIONS if option not in before)]
        if magic == "%stacks":
            return self._dims(before) if before else self._session.names()
        if magic == "%freeze":
            return ["--off"] if before else self._session.names("actors")
        if not before:
            stopped = [record.name for record in debug.sessions()] if magic == "%%mdb" else []
            first = ["release"] if magic == "%mpm" else []
            return list(dict.fromkeys([*stopped, *self._session.names("actors"), *first]))
        return self._dims(before)

    def _break(self, before: list[str]) -> list[str]:
        if not before:
            return ["clear", *self._functions()]
        if before[0] == "clear":
            return [str(bp.number) for bp in debug.breakpoints()]
        if "on" not in before:
            return ["on", "if"] if "if" not in before else ["on"]
        after = before[before.index("on") + 1 :]
        return self._dims(after) if after else self._session.names("actors")

    def values(self, magic: str, before: list[str], label: str) -> list[str]:
        """Values for `label=`; on a line of %break the mesh is named after "on"."""
        return super().values(magic, before[before.index("on") + 1 :] if "on" in before else before, label)

    def _functions(self) -> list[str]:
        """Returns the methods of the existing actors."""
        functions: list[str] = []
        for name in self._session.names("actors"):
            mesh = self._session.find(name)
            if isinstance(mesh, ActorMesh):
                cls = state_of(mesh).cls
                functions += [f"{cls.__name__}.{method}" for method in vars(cls) if not method.startswith("_")]
        return list(dict.fromkeys(functions))


@magics_class
class DebugMagics(SessionMagics):
    """%mdb, %%mdb, %break, %mpm, %reproduce, %stacks."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell, session)
        self.waiting: WaitPrompt | None = None  # of the current engine
        self._prompts: dict[str, DebugPrompt] = {}
        DebugCompletion(shell, session).install()

    @no_var_expand
    @line_cell_magic
    def mdb(self, line: str, cell: str | None = None) -> Listing | CellResults:
        """Show what is stopped in the debugger; as a cell magic, run the cell's lines as commands on stopped ranks.

        %mdb                       # groups of ranks, who is missing, the source around the line
        %%mdb [NAME] [dim=index] [dim=from:to] ...

            %%mdb trainers gpus=3
            p loss
            n
            diff loss

        All commands of the prompt are there (`help` lists them). A statement that goes on in indented lines is one
        command. What came of each is shown, and kept as data in `_`: _[0].values has the values by rank. Needs no
        prompt and no widgets. From Python: monarch.debug.table(), monarch.debug.group(trainers, gpus=3).run("p loss").
        """
        if cell is None:
            if line.strip():
                raise UsageError("%mdb takes no arguments; commands go below it: %%mdb NAME")
            return StoppedTable(self._prompt("").table())
        prompt = self._prompt(line)
        if not prompt.candidates():
            every = debug.sessions()
            stopped = f"; stopped: {named(every)}" if every else ""
            raise UsageError(f"{f'%%mdb {line}'.rstrip()}: none of these ranks is stopped{stopped}")
        results = CellResults([prompt.do(command) for command in commands(cell)])
        give_back_underscores(self.shell)
        return results

    @no_var_expand
    @line_magic("break")  # type: ignore[arg-type]  # its decorators are typed for bare use only
    def set_break(self, line: str) -> object:
        """Set a breakpoint in actors that run already, without touching their code.

        %break PLACE [if CONDITION] on NAME [dim=index] ...     # PLACE is file.py:42, or a function
        %break                                                  # those that there are
        %break clear [NUMBER]                                   # one of them, or all, away

            %break train.py:42 if loss.isnan() on trainers gpus=3
            %break Trainer.step on trainers
            %break transformers.Trainer.training_step on workers    # any function by its full name; on processes it
                                                                    # holds in cells and in all actors there
        It takes effect from each actor's next endpoint call on. From Python: monarch.debug.set_breakpoint().
        """
        words = line.split()
        if not words:
            breakpoints = debug.breakpoints()
            if not breakpoints:
                sys.stdout.write("no breakpoints are set; %break train.py:42 on trainers sets one\n")
            return breakpoints or None
        if words[0] == "clear":
            for number in words[1:]:
                if not number.isdecimal():
                    raise UsageError(f"%break clear {number}: write the number of a breakpoint; %break lists all")
                debug.clear_breakpoint(int(number))
            if not words[1:]:
                debug.clear_breakpoint()
            return None
        parsed = _BREAK.fullmatch(line.strip())
        if parsed is None:
            raise UsageError("%break: write %break train.py:42 if loss.isnan() on trainers gpus=3")
        selection = read_place("%break", parsed["mesh"])
        part = selection.of(self._session.find(selection.name))
        try:
            return debug.set_breakpoint(parsed["location"], part, condition=parsed["condition"] or "")
        except SyntaxError as error:
            raise UsageError(f"%break: {parsed['condition']} is not an expression: {error.msg}") from None
        except DebugError as error:
            raise UsageError(f"%break: {error}") from None

    @line_magic
    def mpm(self, line: str) -> object:
        """Look into the frames of a call that failed, on the rank where it was raised; the actor goes on serving.

        %mpm                       # of the last ActorError
        %mpm NAME dim=index ...    # the last failure of this rank
        %mpm release NAME          # let go of what is kept of a mesh's failures

        Where there is a prompt it opens here; `q` closes the frames. Else %%mdb gives commands, and %%mdb's `c` closes
        them. How many failures are kept: configure(debug_keep_failures=3, debug_keep_bytes=...).
        From Python: monarch.debug.post_mortem(error).
        """
        words = line.split()
        if words[:1] == ["release"]:
            debug.release(self._session.find(" ".join(words[1:]) or "?"))
            return None
        try:
            group = self._open(line)
        except DebugError as error:
            raise UsageError(f"%mpm: {error}") from None
        prompt = DebugPrompt(debug.controller(), lambda: group.sessions, self._name)
        if self.waiting is None or not self.waiting.terminal.can_ask:
            record = group.sessions[0]
            how = f"%%mdb {record.name} at the top of a cell gives commands to it; `c` closes the frames"
            return StoppedTable(f"{prompt.table()}\n\n{how}")
        self._converse(prompt)
        for record in group.sessions:
            if prompt.leave != "detach":
                debug.controller().go([record])
        return None

    @line_magic
    def reproduce(self, line: str) -> Any:
        """Run a call that failed on a rank again, here in the kernel, with the rank's actor and arguments.

        %reproduce [NAME] [--step] [--rank N] [--limit BYTES]

            %reproduce                # of the last ActorError; %debug then opens the frames
            %reproduce error          # of one in a variable
            %reproduce --step         # the debugger stops at the first line of the method
            %reproduce --rank 3       # another one of the ranks that raised
            %reproduce --limit 2G     # where the actor and its arguments have more than 256 MiB

        The actor comes as it is now on its rank; calls that the method makes on other meshes are real ones. What
        cannot be pickled is named, and raises where it is used. If nothing is raised here, the value is shown, and
        what differs from the rank. From Python: error.reproduce().
        """
        args = _read_reproduce(line)
        error: Any = self.shell.user_ns.get(args.name) if args.name else last_error(self.shell)
        if not isinstance(error, ActorError):
            fault = f"{args.name} is {kind_of(error)}, and no ActorError" if args.name else "the last error was none"
            raise UsageError(
                f"%reproduce: {fault}; it runs a call again that an ActorError is about: write %reproduce NAME for one "
                "in a variable"
            )
        if args.step and (self.waiting is None or not self.waiting.terminal.can_ask):
            raise UsageError("%reproduce --step asks for commands, and there is no prompt here: leave --step out")
        step = partial(self.shell.debugger_cls, skip=SKIPPED) if args.step else False
        try:
            return error.reproduce(step=step, **dict(args.options))
        except DebugError as refused:
            raise UsageError(f"%reproduce: {refused}") from None

    def _converse(self, prompt: DebugPrompt) -> None:
        assert self.waiting is not None
        try:
            converse(prompt, self.waiting.terminal, ending="close")
        except NoPrompt:
            prompt.leave = "detach"

    def _open(self, line: str) -> debug.Group:
        if line.strip():
            selection = read_place("%mpm", line)
            return debug.post_mortem(selection.of(self._session.find(selection.name)))
        error = last_error(self.shell)
        if error is None:
            raise DebugError(
                "the last error was not an ActorError, so it names no rank: write which one, as in %mpm trainers gpus=3"
            )
        return debug.post_mortem(error)

    @line_magic
    def stacks(self, line: str) -> Listing:
        """Show where every rank of a mesh is: the Python stacks of all, merged into one tree.

        %stacks NAME [dim=0-2,5] ...

        Of a mesh of processes, these are the stacks of all actors on them. Ranks held by one long call in C, which
        cannot answer, are inspected with py-spy where it is installed. From Python: monarch.debug.stacks(trainers).
        """
        selection = read_place("%stacks", line)
        return Listing(debug.stacks(selection.of(self._session.find(selection.name))))

    @line_magic
    def freeze(self, line: str) -> None:
        """Stop ranks where they raise, as at a breakpoint.

        %freeze NAME          # from now on
        %freeze NAME --off

        From Python: monarch.debug.freeze_on_error(trainers).
        """
        meshes, options = read_names("%freeze", line, ("--off",))
        for name in meshes:
            debug.freeze_on_error(self._session.find(name), on="--off" not in options)
            sys.stdout.write(f"{name} {'no longer' if options else 'now'} stops where an endpoint raises\n")

    def _name(self, file: str) -> str:
        return cell_name(self.shell, file) or file.rpartition("/")[2]

    def _prompt(self, line: str) -> DebugPrompt:
        """Returns the prompt of this line, which is stored: later cells have the same focus and watched expressions."""
        key = " ".join(line.split())
        stored = self._prompts.get(key)
        controller = debug.controller()
        group = self._group(line)  # the name may mean another mesh by now
        if stored is not None and stored.controller is controller:
            stored.leave, stored.interactive, stored.candidates = "", False, lambda: group.sessions
            return stored
        prompt = DebugPrompt(controller, lambda: group.sessions, self._name, everybody=bool(key))
        self._prompts[key] = prompt
        return prompt

    def _group(self, line: str) -> debug.Group:
        if not line.strip():
            return debug.group()
        selection = read_place("%%mdb", line)
        try:
            mesh = self._session.find(selection.name)
        except UsageError:
            if any(record.name == selection.name for record in debug.sessions()):
                return debug.group(selection.name, **selection.picks[0] if selection.picks else {})  # of another kernel
            raise
        return debug.group(selection.of(mesh))


def commands(cell: str) -> list[str]:
    """Returns the commands of a cell, one in each line; indented lines continue the line before."""
    texts: list[str] = []
    for line in cell.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        follows = texts and (line[:1].isspace() or re.match(r"(else|elif|except|finally)\b", line))
        if follows:
            texts[-1] += f"\n{line}"
        else:
            texts.append(line)
    return [f"{text}\n" if "\n" in text else text for text in texts]


def last_error(shell: InteractiveShell) -> ActorError | None:
    """Returns the ActorError that a cell ended with last, also behind another error."""
    error: Any = getattr(sys, "last_value", None)
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, ActorError):
            return error
        error = error.__cause__ or error.__context__
    return None


def with_remote(shell: InteractiveShell) -> Any:
    """IPython's %debug, which opens the rank's frames where the last error came from one."""
    before = line_magic_of(shell, "debug")

    def run(line: str = "", cell: object = None) -> object:
        error = None if line.strip() or cell else last_error(shell)
        is_local = error is not None and error.reproduced is getattr(sys, "last_value", None)
        if error is not None and error.origin is not None and not is_local:
            return shell.run_line_magic("mpm", "")
        return before(line) if cell is None else before(line, cell)

    run.__doc__ = before.__doc__
    return run

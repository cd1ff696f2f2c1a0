"""%why and %%watch: which ranks hold others up, are slow, differ or use more memory, and where a NaN is from; %%prof
and %timeline: where ranks spend their time, and what they do when.
"""

import ast
import inspect
import sys
from contextlib import AbstractContextManager, suppress
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import cell_magic, line_cell_magic, magics_class, no_var_expand
from IPython.display import display

from monarch_nb import diagnosis, profiling
from monarch_nb._parsing import parsed
from monarch_nb.transport import held_back

from .arguments import WHY_OPTIONS, check_options, read_place, read_profile, read_timeline
from .display.errors import cell_syntax
from .jupyter import give_back_underscores, transformed
from .session import SessionMagics
from .views.timelines import TIMELINES

if TYPE_CHECKING:
    from monarch_nb.diagnosis import Diagnosis, MemoryWatch, ReplicaWatch, StragglerWatch, ValueWatch
    from monarch_nb.profiling import Profile, Timeline

F = TypeVar("F")


class _WhyArguments(NamedTuple):
    name: str = ""
    abort: bool = False
    slow: bool = False
    seconds: tuple[float, ...] = ()  # of the comparison, if the line has them
    replicas: bool = False
    memory: bool = False


def _read_why(line: str, cell: str | None) -> _WhyArguments:
    """Reads the line of %why. Raises UsageError."""
    words, magic = line.split(), "%why" if cell is None else "%%why"
    options = {word for word in words if word.startswith("-")}
    check_options(magic, options, set(WHY_OPTIONS))
    slow, seconds = "--slow" in options, tuple[float, ...]()
    if slow:
        after = words[words.index("--slow") + 1 :][:1]
        with suppress(ValueError):
            seconds = tuple(map(float, after))
            words = [word for word in words if word not in after]
    names = [word for word in words if word not in options]
    if len(names) > 1 or len(options) > 1:
        raise UsageError(
            "%why takes the name of one mesh, or none, and --abort, --memory, --replicas, or --slow and a number of "
            "seconds"
        )
    memory = "--memory" in options
    if cell is not None and not slow and not (names and options & {"--memory", "--replicas"}):
        raise UsageError(
            f"{magic} compares ranks while a cell runs: write %%why NAME --slow, %%why NAME --memory, or "
            "%%why NAME --replicas"
        )
    if "--replicas" in options and not names:
        raise UsageError("%why --replicas compares the ranks of one mesh: write %why NAME --replicas")
    return _WhyArguments("".join(names), "--abort" in options, slow, seconds, "--replicas" in options, memory)


@magics_class
class DiagnosisMagics(SessionMagics):
    """%why and %%watch."""

    @no_var_expand
    @line_cell_magic
    def why(self, line: str, cell: str | None = None) -> "Diagnosis | StragglerWatch | MemoryWatch | ReplicaWatch":
        """Say which ranks hold the others up, and why.

        %why [NAME] [--abort | --slow [SECONDS] | --memory]
        %why NAME --replicas
        %%why [NAME] --slow
        %%why NAME --memory
        %%why NAME --replicas

            %why                      # of all meshes with calls under way
            %why trainers
            %why trainers --abort     # ends the calls that the findings explain; the processes live on
            %why trainers --slow      # which ranks are slow, and in what: compares them for 3 seconds
            %why trainers --replicas  # which ranks have other parameters than the rest
            %why trainers --memory    # which ranks use more memory than others

            %%why trainers --slow     # while this cell runs
            trainers.step.call().get()

            %%why trainers --memory   # at which lines memory grows while this cell runs, and what it was at its peak
            trainers.step.call().get()

            %%why trainers --replicas # since which step of this cell ranks differ
            trainers.step.call().get()

        Every process says which endpoint it runs, where, and which collective of torch.distributed it has begun. A rank
        that has not begun the one in which others wait is named with its line. Nothing is interrupted or changed
        without --abort. A cell that has waited for ten seconds without progress shows the same beneath itself.

        With --slow, ranks that make progress are compared: who begins collectives last or takes longer for calls, in
        which phase of a step (forward, backward, optimizer, data iterator, garbage collection) and at which line. With
        --replicas, the checksums of parameters and optimizer states. From Python: monarch.diagnose(trainers), and
        abort(trainers), stragglers(trainers), compare_replicas(trainers), ReplicaWatch(trainers),
        compare_memory(trainers) and MemoryWatch(trainers) of monarch_nb.diagnosis.
        """
        args = _read_why(line, cell)
        mesh = self._session.find(args.name) if args.name else None
        if cell is not None:
            if args.memory and mesh is not None:
                tensors = self._session.value(args.name)
                growth = diagnosis.MemoryWatch(tensors if diagnosis.has_sharded_tensors(tensors) else mesh)
                return run_within(self.shell, cell, growth, "with MemoryWatch(NAME) as found: …, then found")
            if args.replicas and mesh is not None:
                drift = diagnosis.ReplicaWatch(mesh)
                return run_within(self.shell, cell, drift, "with ReplicaWatch(NAME) as found: …, then found")
            context = diagnosis.StragglerWatch(mesh)
            return run_within(self.shell, cell, context, "with StragglerWatch(NAME) as found: …, then found")
        if args.slow:
            return diagnosis.stragglers(mesh, *args.seconds)
        if args.memory:
            return diagnosis.compare_memory(mesh)
        if args.replicas and mesh is not None:
            return diagnosis.compare_replicas(mesh)
        return (diagnosis.abort if args.abort else diagnosis.diagnose)(mesh)

    @no_var_expand
    @cell_magic
    def watch(self, line: str, cell: str) -> "ValueWatch":
        """Run a cell, and find where the first NaN comes from on the ranks of a mesh meanwhile.

        %%watch NAME [dim=0] [dim=0-2,5] ... [--stop]

            %%watch trainers
            trainers.step.call().get()

            %%watch trainers gpus=0-3 --stop   # the debugger stops the rank there

            %%watch mesh   # of sharded tensors

        Every operation of PyTorch in the actors is checked until one gives a NaN; a small step takes half as much
        again. The rank, the operation, the module and the line are shown beneath the cell's value, and are in `_`. From
        Python: with monarch.watch(trainers) as found: ...
        """
        target = read_place("%%watch", line, ("--stop",))
        tensors = self._session.value(target.name)
        if diagnosis.has_sharded_tensors(tensors):
            if target.picks or target.options:
                raise UsageError("%%watch: of a mesh of sharded tensors all ranks are watched, and none can be stopped")
            context = diagnosis.watch(tensors)
        else:
            context = diagnosis.watch(target.of(self._session.find(target.name)), stop="--stop" in target.options)
        return run_within(self.shell, cell, context, "with monarch.watch(NAME) as found: …, then found")


@magics_class
class ProfileMagics(SessionMagics):
    """%%prof."""

    @no_var_expand
    @cell_magic
    def prof(self, line: str, cell: str) -> "Profile":
        """Run a cell, and show where every rank of a mesh spends its time meanwhile.

        %%prof NAME [dim=0] [dim=0-2,5] ... [--hz N] [--torch]

            %%prof trainers                  # what differs between ranks, and a flame graph for each group of them
            trainers.step.call().get()

            %%prof trainers gpus=0-3 --hz 500
            %%prof trainers --torch          # also PyTorch's traces of all ranks, as one file for Perfetto

        The stacks of all ranks are sampled, 100 times a second; no code changes and nothing has to be installed there.
        The cell runs here as it would without the first line, and what it gives is shown above the profile; the profile
        is in `_`. A cell that fails or is interrupted shows what was sampled until then. The cell cannot `await`: use
        the Python form for that. From Python: with monarch.profile(trainers) as found: ...
        """
        args = read_profile(line)
        part = args.place.of(self._session.find(args.place.name))
        context = profiling.profile(part, hz=args.hz, torch=args.torch)
        return run_within(self.shell, cell, context, "with monarch.profile(NAME) as found: …, then found")


@magics_class
class TimelineMagics(SessionMagics):
    """%timeline and %%timeline."""

    @no_var_expand
    @line_cell_magic
    def timeline(self, line: str, cell: str | None = None) -> "Timeline":
        """Record what every rank of a mesh does and when: calls, spans, collectives, transfers, breakpoints, heals.

        %timeline [NAME] [dim=0] [dim=0-2,5] ... [--stop] [--save FILE.json]
        %%timeline NAME [dim=0] [dim=0-2,5] ... [--save FILE.json]

            %timeline trainers            # records from now on, and shows it while it grows
            %timeline                     # shows the newest again, as it is now
            %timeline --stop              # ends the recording
            %timeline --save step.json    # a file for https://ui.perfetto.dev

            %%timeline trainers           # while this cell runs
            trainers.step.call().get()

        Ranks that do the same at the same time are one row. Recording takes less than 1 % of each process; without it
        nothing is recorded and nothing is paid. The timeline is in `_`. From Python:
        with monarch.timeline(trainers) as seen: ...
        """
        args = read_timeline("%timeline" if cell is None else "%%timeline", line)
        if cell is not None:
            if args.place is None or args.stop:
                raise UsageError("%%timeline takes the name of a mesh: %%timeline trainers")
            context = TIMELINES.add(profiling.timeline(args.place.of(self._session.find(args.place.name))))
            timeline = run_within(self.shell, cell, context, "with monarch.timeline(NAME) as seen: …, then seen")
        elif args.place is None or args.stop:
            timeline = self._newest(None if args.place is None else args.place.name)
        else:
            timeline = TIMELINES.of(args.place.of(self._session.find(args.place.name))).wait()
        if args.stop:
            timeline.stop()
        if args.save:
            sys.stdout.write(f"wrote {self._saved(timeline, args.save)}: open it at https://ui.perfetto.dev\n")
        return timeline

    @staticmethod
    def _newest(name: str | None) -> "Timeline":
        timelines = [timeline for timeline in TIMELINES.all if name in (None, timeline.name)]
        if not timelines:
            raise UsageError(f"nothing was recorded{f' of {name}' if name else ''} yet: write %timeline trainers")
        return timelines[0]

    @staticmethod
    def _saved(timeline: "Timeline", path: str) -> str:
        try:
            return str(timeline.save(path))
        except (ValueError, OSError) as error:
            raise UsageError(f"%timeline --save: {error}") from None


def run_within(shell: InteractiveShell, cell: str, context: AbstractContextManager[F], python_form: str) -> F:
    """Runs a cell as usual within a context, shows its value, and returns the value of the context for display.

    A cell that fails or is interrupted shows what the context has found until then. Raises UsageError for a cell with
    `await`, which says to write `python_form`.
    """
    statements, last = _compiled(shell, cell, python_form)
    result: F | None = None
    try:
        with context as result:
            exec(statements, shell.user_ns)
            value = None if last is None else eval(last, shell.user_ns)
            if value is not None:
                _show(value)
    except BaseException:
        if result is not None:
            held_back(_show, result)  # another press of stop comes after it
        raise
    give_back_underscores(shell)
    return result


def _compiled(shell: InteractiveShell, cell: str, python_form: str) -> tuple[CodeType, CodeType | None]:
    """Returns the cell's statements, and its last expression, if it ends in one."""
    with cell_syntax():
        source = transformed(shell, cell)
        file = shell.compile.cache(source, shell.execution_count)
        tree = parsed(source, file)
        last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if last is not None:
            tree.body.pop()
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        statements = compile(tree, file, "exec", flags, dont_inherit=True)
        value = None if last is None else compile(ast.Expression(last.value), file, "eval", flags, dont_inherit=True)
    if any(code is not None and code.co_flags & inspect.CO_COROUTINE for code in (statements, value)):
        raise UsageError(f"the cell of this magic cannot `await`. In a cell without it, write: {python_form}")
    return statements, value


def _show(value: Any) -> None:
    display(value)  # type: ignore[no-untyped-call]

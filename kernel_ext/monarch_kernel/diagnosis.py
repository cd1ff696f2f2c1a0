"""%why: which ranks hold others up, are slow, differ or use more memory; %%watch: where a NaN is from."""

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from IPython.core.error import UsageError
from IPython.core.magic import cell_magic, line_cell_magic, magics_class, no_var_expand

from monarch_nb import diagnosis

from .arguments import check_options, read_place
from .session import SessionMagics
from .watched_cells import run_within

if TYPE_CHECKING:
    from monarch_nb.diagnosis import Diagnosis, MemoryWatch, ReplicaWatch, StragglerWatch, ValueWatch


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
    check_options(magic, options, {"--abort", "--slow", "--replicas", "--memory"})
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

"""%why: which ranks hold others up; the same beneath a cell that has waited for long; %%watch: where a NaN is from."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from monarch_nb import diagnosis
from monarch_nb.runtime import ActorState, Future, MeshState, ProcState, Runtime

from .arguments import read_place
from .session import Session
from .watched_cells import run_within

if TYPE_CHECKING:
    from monarch_nb.diagnosis import Diagnosis, ValueWatch

WITHOUT_PROGRESS_S = 10.0  # until a waiting cell looks for the reason
AGAIN_S = 5.0  # between two looks of a waiting cell
MOST_LINES = 4  # beneath a waiting cell


@magics_class
class DiagnosisMagics(Magics):
    """%why and %%watch."""

    def __init__(self, shell: Any, session: Session) -> None:
        super().__init__(shell)
        self._session = session

    @line_magic
    def why(self, line: str) -> "Diagnosis":
        """Say which ranks hold the others up, and why.

        %why [NAME] [--abort]

            %why                    # of all meshes with calls under way
            %why trainers
            %why trainers --abort   # ends the calls that the findings explain; the processes live on

        Every process says which endpoint it runs, where, and which collective of torch.distributed it has begun. A rank
        that has not begun the one in which others wait is named with its line. Nothing is interrupted or changed
        without --abort. A cell that has waited for ten seconds without progress shows the same beneath itself. From
        Python: monarch.diagnose(trainers), and abort(trainers) of monarch_nb.diagnosis.
        """
        words = line.split()
        names = [word for word in words if word != "--abort"]
        if len(names) > 1 or any(name.startswith("-") for name in names):
            raise UsageError("%why takes the name of one mesh, or none, and --abort")
        act = diagnosis.abort if "--abort" in words else diagnosis.diagnose
        return act(self._session.find(names[0]) if names else None)

    @no_var_expand
    @cell_magic
    def watch(self, line: str, cell: str) -> "ValueWatch":
        """Run a cell, and find where the first NaN comes from on the ranks of a mesh meanwhile.

        %%watch NAME [dim=0] [dim=0-2,5] ... [--stop]

            %%watch trainers
            trainers.step.call().get()

            %%watch trainers gpus=0-3 --stop   # the debugger stops the rank there

        Every operation of PyTorch in the actors is checked until one gives a NaN; a step takes up to twice as long. The
        rank, the operation, the module and the line are shown beneath the cell's value, and are in `_`. From Python:
        with monarch.watch(trainers) as found: ...
        """
        place = read_place("%%watch", line, ("--stop",))
        context = diagnosis.watch(place.of(self._session.find(place.name)), stop="--stop" in place.options)
        return run_within(self.shell, cell, context, "with monarch.watch(NAME) as found: …, then found")


class HangNotes:
    """The reason why a call makes no progress, looked for in the background of a waiting cell."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._missing: frozenset[int] = frozenset()
        self._since = self._next = time.monotonic()
        self._asked: Future[Diagnosis] | None = None
        self._lines: list[str] = []

    def lines(self, state: MeshState, missing: Sequence[int]) -> list[str]:
        """The findings about a call that waits for these base ranks; none while ranks still answer."""
        now = time.monotonic()
        if (current := frozenset(missing)) != self._missing:
            self._missing, self._since, self._lines = current, now, []
        procs = state.procs if isinstance(state, ActorState) else state
        if self._asked is not None and self._asked.done():
            asked, self._asked, self._next = self._asked, None, now + AGAIN_S
            self._lines = _lines(asked.get(0)) if asked.exception(0) is None and self._waits(now) else []
        if self._asked is None and self._waits(now) and now >= self._next and isinstance(procs, ProcState):
            from monarch_nb.diagnosis.collector import diagnosing

            self._asked = diagnosing(self._runtime, procs)
        return self._lines

    def _waits(self, now: float) -> bool:
        return bool(self._missing) and now - self._since >= WITHOUT_PROGRESS_S


def _lines(found: "Diagnosis") -> list[str]:
    return [finding.line for finding in found.findings[:MOST_LINES]]

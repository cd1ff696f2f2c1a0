"""%%prof and %timeline: where the ranks of a mesh spend their time, and what they do when."""

import sys
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import cell_magic, line_cell_magic, magics_class, no_var_expand

from monarch_nb import profiling

from .arguments import read_profile, read_timeline
from .session import SessionMagics
from .views.timelines import TIMELINES
from .watched_cells import run_within

if TYPE_CHECKING:
    from monarch_nb.profiling import Profile, Timeline


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

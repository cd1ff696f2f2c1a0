"""%%prof: a cell, and where the ranks of a mesh spend their time while it runs."""

from typing import TYPE_CHECKING

from IPython.core.magic import cell_magic, magics_class, no_var_expand

from .arguments import read_profile
from .session import SessionMagics
from .watched_cells import run_within

if TYPE_CHECKING:
    from monarch_nb.profiling import Profile


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
        from monarch_nb.profiling import profile

        given = read_profile(line)
        part = given.place.of(self._session.find(given.place.name))
        context = profile(part, hz=given.hz, torch=given.torch)
        return run_within(self.shell, cell, context, "with monarch.profile(NAME) as found: …, then found")

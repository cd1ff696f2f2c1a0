"""A job on the hosts of an MPI launcher."""

import shlex
from collections.abc import Mapping, Sequence

from monarch_nb.job.adapted import AdapterJob
from monarch_nb.job.role import Role


class MPIJob(AdapterJob):
    """A host agent for each rank of `mpirun`, as in `MPIJob({"trainers": 4}, mpi_args="--map-by ppr:1:node")`.

    `launcher` is the command (`mpirun`, `mpiexec`, `srun --mpi=pmix`), which stays a process of this machine: its end
    is that of the job. Ranks must share `$XDG_STATE_HOME/monarch-nb/jobs` with this machine, where the key is a file of
    mode 0600. `python_exe` is the interpreter there. MPI itself is not used between processes. Raises EngineError.
    """

    def __init__(
        self, meshes: "Mapping[str, int | Role]", python_exe: str = "python3", mpi_args: Sequence[str] | str = (),
        launcher: str = "mpirun", monarch_port: int = 0, env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        words = shlex.split(mpi_args) if isinstance(mpi_args, str) else list(mpi_args)
        options = {"python": python_exe, "mpi_args": words, "launcher": launcher, "port": monarch_port}
        super().__init__("mpi", meshes, env, options=options)

"""`LoginJob`, from which programs of torchmonarch derive kinds of jobs."""

from collections.abc import Sequence

from monarch_nb.job import ProcessJob
from monarch_nb.job.process import ProcessState


class LoginJob(ProcessJob):
    """Hosts that are named one by one; a subclass starts a worker for each in `_start_host`. `kill()` ends these."""

    def __init__(self) -> None:
        super().__init__({})

    def add_mesh(self, name: str, hosts: Sequence[str]) -> None:
        """Adds a mesh of these hosts, in this order."""
        machines = {**self._options.get("machines", {}), name: list(hosts)}
        self._wish({mesh: len(names) for mesh, names in machines.items()})
        self._options = {**self._options, "machines": machines}

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError("a LoginJob runs no client scripts")
        for mesh, machines in self._options.get("machines", {}).items():
            for name, machine in zip(self._names(mesh), machines, strict=True):
                self._host_to_pid[name] = self._start_host(machine)

    def _start_host(self, host: str) -> ProcessState:
        """Starts a worker on this host; returns a process of this machine that ends with it, and its address."""
        raise NotImplementedError("_start_host starts a worker and returns its ProcessState(pid, address)")

"""Jobs of any kind: host meshes of the agents that the kind's adapter starts."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from monarch_nb.connect import attach_to_workers
from monarch_nb.host.folders import base_folder
from monarch_nb.job.adapter import PREFIX, Agent, AgentsWanted, JobAdapter
from monarch_nb.job.kinds import adapter_of
from monarch_nb.job.state import JobState
from monarch_nb.job.trait import Applied, JobTrait
from monarch_nb.mesh import HostMesh, give_up, this_host


class AdapterForm(msgspec.Struct):
    """What is saved of a job."""

    _kind: str
    _meshes: dict[str, Annotated[int, msgspec.Meta(ge=1)]]
    _env: dict[str, str]
    _agents: dict[str, Agent]
    _folder: str


class AdapterJob(JobTrait):
    """Hosts of one kind, such as `"process"`; `meshes` gives the number of hosts of each mesh.

    `env` is laid over the environment of the hosts, which live on when the client ends. `kill()` ends them, from any
    process that has the job's file. Raises LookupError for a kind that is not there.
    """

    _transient = frozenset({"_given"})
    _form: ClassVar[type[msgspec.Struct] | None] = AdapterForm

    def __init__(self, kind: str, meshes: Mapping[str, int], env: Mapping[str, str] | None = None) -> None:
        super().__init__()
        for name, count in meshes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"{name!r} cannot name a mesh: it must be a name as Python has them")
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}={count!r}: a mesh has a whole number of hosts, at least 1")
        self._kind = kind
        self._meshes = dict(meshes)
        self._env = dict(env or {})
        self._agents: dict[str, Agent] = {}
        self._folder = ""
        self._restored()

    def _restored(self) -> None:
        adapter_of(self._kind)  # which is there, or it is said now
        self._given: list[HostMesh] = []

    @property
    def _adapter(self) -> JobAdapter:
        return adapter_of(self._kind)

    def _names(self, mesh: str) -> list[str]:
        return [f"{mesh}_{number}" for number in range(self._meshes[mesh])]

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError(f"a {type(self).__name__} cannot run a client script: run it yourself, beside the job")
        self._folder = tempfile.mkdtemp(prefix=PREFIX, dir=base_folder())
        try:
            self._start(Path(self._folder))
        except BaseException:
            self._kill()
            raise

    def _start(self, folder: Path) -> None:
        names = tuple(name for mesh in self._meshes for name in self._names(mesh))
        wanted = AgentsWanted(str(self._applied.apply_id), names, folder, self._env)
        self._agents = dict(self._adapter.start(wanted))

    def _state(self) -> JobState:
        lost = self._lost()
        if lost:
            raise RuntimeError(f"the job is gone: {self._described()}: {lost}")
        return JobState({mesh: self._host_mesh(mesh) for mesh in self._meshes})

    def _host_mesh(self, mesh: str) -> HostMesh:
        joins = [self._agents[name].join for name in self._names(mesh)]
        if joins == [""]:
            return this_host()
        key = Path(self._folder, "key")
        hosts = attach_to_workers(
            name=mesh, ca="trust_all_connections", workers=joins, private_key=key if key.exists() else None
        )
        self._given.append(hosts)
        return hosts

    def _wishes(self) -> str:
        return ", ".join(f"{name}={count}" for name, count in self._meshes.items())

    def _lost(self) -> str:
        if not self._agents:
            return "it has no hosts"
        ended = self._adapter.ended(self._agents)
        return "; ".join(f"{name} {how}" for name, how in ended.items())

    def can_run(self, spec: JobTrait) -> bool:
        """A job of the same kind, with the same meshes and environment, whose agents all run."""
        if not isinstance(spec, AdapterJob):
            return False
        same = (spec._kind, spec._meshes, spec._env) == (self._kind, self._meshes, self._env)
        return same and not self._lost()

    def _kill(self) -> None:
        for mesh in self._given:
            give_up(mesh, "its job was killed")
        self._adapter.kill(self._agents)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._agents, self._folder = {}, ""
        self._restored()


def running_jobs(kind: str) -> list[AdapterJob]:
    """The jobs of a kind that run, also those whose files are lost: `state()` gives their hosts, `kill()` ends them.

    Raises LookupError for a kind that is not there.
    """
    jobs = []
    for number, (folder, agents) in adapter_of(kind).running().items():
        meshes: dict[str, int] = {}
        for name in agents:
            mesh = name.rpartition("_")[0]
            meshes[mesh] = meshes.get(mesh, 0) + 1
        job = AdapterJob(kind, meshes)
        job._agents, job._folder, job._applied = dict(agents), folder, Applied(number)
        jobs.append(job)
    return jobs

"""`monarch._testing` of torchmonarch: meshes of this machine for tests of tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from monarch_nb.distributed import Mesh
from monarch_nb.job import ProcessJob
from monarch_nb.mesh import ProcMesh


class TestingContext:
    """Makes meshes of local processes, and ends these at the end of a `with` block.

    Successive meshes of one extent have the same processes.
    """

    __test__ = False  # pytest collects classes of such names

    def __init__(self) -> None:
        self._procs: dict[tuple[int, int], tuple[ProcessJob, ProcMesh]] = {}

    @contextmanager
    def local_engine_on_proc_mesh(self, num_hosts: int, gpu_per_host: int) -> Iterator[Mesh]:
        """Yields a mesh with dimensions `host` and `gpu` for tensors of each rank's own values. Blocks.

        Raises what its processes raise, also errors of operations that nobody has waited for.
        """
        extent = num_hosts, gpu_per_host
        if extent not in self._procs:
            job = ProcessJob({"hosts": num_hosts})
            self._procs[extent] = job, job.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": gpu_per_host})
        mesh = Mesh.for_ranks(self._procs[extent][1]).rename(hosts="host", gpus="gpu")
        yield mesh
        mesh.exit()

    @contextmanager
    def local_device_mesh(
        self,
        num_hosts: int,
        gpu_per_host: int,
        activate: bool = True,
        backend: str = "py",
        controller_params: object = None,
    ) -> Iterator[Mesh]:
        """Yields the same mesh, by default active. `backend` and `controller_params` have no effect."""
        with self.local_engine_on_proc_mesh(num_hosts, gpu_per_host) as mesh:
            if activate:
                with mesh.activate():
                    yield mesh
            else:
                yield mesh

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        procs, self._procs = self._procs, {}
        for job, _ in procs.values():
            job.kill()

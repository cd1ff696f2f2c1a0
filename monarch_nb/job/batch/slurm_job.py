"""A job on nodes of a Slurm cluster."""

import importlib
import ipaddress
import os
from collections.abc import Mapping, Sequence

from monarch_nb.job.adapted import AdapterJob
from monarch_nb.job.role import Role


class SlurmJob(AdapterJob):
    """One host agent on each node that Slurm gives: `SlurmJob({"trainers": 4}, partition="gpu", gpus_per_node=8)`.

    Meshes whose hosts are alike share one batch job; a `Role` asks for others: `{"loaders": Role(hosts=2, cpus=16)}`.
    `python_exe` is the interpreter on the nodes, with monarch-nb installed; `slurm_args` are added as #SBATCH lines.
    The job's folder, `$XDG_STATE_HOME/monarch-nb/jobs`, must be shared with the nodes, as home folders are: the key is
    a file of mode 0600 there. Agents listen at any free port of their node, or at `monarch_port`, of `bind_to` alone if
    that is given. `state()` does not wait for the queue; `job_start_timeout` seconds after that the job is given up
    (None: never). With `out_of_cluster` the nodes are reached through the first of them that answers, or through
    `attach_to`, such as the end here of a forwarded port. `apply(client_script)` runs a script on the first node, and
    the allocation ends with it. Raises EngineError, with Slurm's words.
    """

    def __init__(
        self, meshes: "Mapping[str, int | Role]", python_exe: str = "python", slurm_args: Sequence[str] = (),
        monarch_port: int = 0, job_name: str = "monarch_job", ntasks_per_node: int = 1,
        time_limit: str | None = None, partition: str | None = None, log_dir: str | None = None,
        exclusive: bool = True, gpus_per_node: int | None = None, cpus_per_task: int | None = None,
        mem: str | None = None, job_start_timeout: float | None = None, account: str | None = None,
        qos: str | None = None, out_of_cluster: bool = False, attach_to: str | None = None,
        bind_to: str | None = None, *, env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        if bind_to is not None:
            try:
                ipaddress.ip_address(bind_to)
            except ValueError:
                raise ValueError(f"bind_to={bind_to!r} must be an IP address, without a port") from None
        options = {
            "python": python_exe, "slurm_args": list(slurm_args), "port": monarch_port, "job_name": job_name,
            "ntasks_per_node": ntasks_per_node, "time_limit": time_limit, "partition": partition,
            "log_dir": None if log_dir is None else os.path.abspath(log_dir), "exclusive": exclusive,
            "gpus_per_node": gpus_per_node, "cpus_per_task": cpus_per_task, "mem": mem, "account": account, "qos": qos,
            "through_first": out_of_cluster, "attach_to": attach_to, "bind_to": bind_to,
        }  # fmt: skip
        given = {name: value for name, value in options.items() if value or name == "exclusive"}
        super().__init__("slurm", meshes, env, options=given, patience=job_start_timeout)

    def add_mesh(self, name: str, num_nodes: "int | Role") -> None:
        """Another mesh, of so many nodes. Raises ValueError after the job was applied."""
        if self.active:
            raise ValueError("the job runs: a mesh can only be added before")
        self._wish({**{mesh: self._role(mesh) for mesh in self._meshes}, name: num_nodes})

    def share_node(self, tasks_per_node: int, gpus_per_task: int, partition: str) -> None:
        """Leaves the rest of each node to other jobs. Raises RuntimeError where `clusterscope` is not installed."""
        try:
            scope = importlib.import_module("clusterscope")
        except ImportError:
            raise RuntimeError("share_node asks clusterscope for a share of a node: pip install clusterscope") from None
        share = scope.job_gen_task_slurm(
            partition=partition, gpus_per_task=gpus_per_task, tasks_per_node=tasks_per_node
        )
        wanted = {"exclusive": False, "cpus_per_task": share["cpus_per_task"], "mem": share["memory"]}
        self._options = {**self._options, **wanted}

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            self._options = {**self._options, "client_script": os.path.abspath(client_script)}
        if self._options.get("log_dir"):
            os.makedirs(self._options["log_dir"], exist_ok=True)
        super()._create(None)
        if client_script is not None:
            self.dump(os.path.join(self._folder, "batch.json"))

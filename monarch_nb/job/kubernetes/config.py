"""Access to a cluster's API."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_nb.job.adapter import EngineError

_INSTALL = "pip install 'monarch-nb[kubernetes]'"
_memory: dict[str, Any] = {}  # configurations that are in no file, by name


@dataclass(frozen=True)
class KubeConfig:
    """A cluster and a user: a kubeconfig file, or a configuration of the client `kubernetes`.

    Without either, the configuration of the pod in which this process runs.
    """

    local: Path | None = None
    remote: Any = None

    @classmethod
    def from_path(cls, path: str) -> "KubeConfig":
        """Uses a kubeconfig file, in its current context."""
        return cls(local=Path(path).expanduser())

    @classmethod
    def from_config(cls, config: Any) -> "KubeConfig":
        """Uses a `kubernetes.client.Configuration` of this process: other processes cannot use the job with it."""
        return cls(remote=config)

    @property
    def out_of_cluster(self) -> bool:
        """True if this process is outside of the cluster, where no pod can be dialled."""
        return self.local is not None or self.remote is not None

    def saved(self) -> str:
        """Returns a text that names the configuration, for `api_client`."""
        if self.local is not None:
            return os.path.abspath(self.local)
        if self.remote is None:
            return ""
        name = f"memory:{os.getpid()}:{id(self.remote)}"
        _memory[name] = self.remote
        return name


def api_client(saved: str) -> Any:
    """Returns a client of the cluster's API. Raises EngineError that says what to do."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise EngineError(f"a KubernetesJob needs the package kubernetes: {_INSTALL}") from None
    if saved.startswith("memory:"):
        if saved not in _memory:
            raise EngineError(
                "the job was made with a configuration of another process: make it again with KubeConfig.from_path, "
                "or kill it where it was made"
            )
        return client.ApiClient(_memory[saved])
    configuration = client.Configuration()
    try:
        if saved:
            config.load_kube_config(saved, client_configuration=configuration)
        else:
            config.load_incluster_config(client_configuration=configuration)
    except Exception as error:  # the client raises errors of all kinds, for files of all kinds
        problem = f"the kubeconfig {saved} cannot be used" if saved else "this process does not run in a pod"
        raise EngineError(f"{problem}: {error}. Name one with kubeconfig=KubeConfig.from_path(...)") from None
    configuration.retries = 1
    return client.ApiClient(configuration)

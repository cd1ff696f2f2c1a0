"""Jobs on pods of a Kubernetes cluster."""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monarch_nb.job.adapter import Role, register_job
from monarch_nb.job.adapter_job import AdapterJob
from monarch_nb.job.kubernetes.config import KubeConfig
from monarch_nb.job.kubernetes.template import RANK_LABEL, USER, selector_of

__all__ = ["ImageSpec", "KubeConfig", "KubernetesJob"]

_NAME = re.compile(r"[a-z][a-z0-9]{0,62}")


@dataclass(frozen=True)
class ImageSpec:
    """The container image of a mesh's pods, with monarch-nb in it.

    `resources` are both requests and limits, as `{"nvidia.com/gpu": 4}`. `enable_fuse` gives the pods /dev/fuse, for
    which they are privileged; `shared_memory_size`, such as "16Gi", is the size of /dev/shm. Without FUSE the pods meet
    the pod security standard "restricted" and run as `run_as_user`; None: as the image's user, who must not be root.
    """

    image: str
    resources: Mapping[str, "str | int"] | None = None
    enable_fuse: bool = False
    shared_memory_size: str | None = None
    run_as_user: int | None = USER


class KubernetesJob(AdapterJob):
    """Pods as hosts: created for meshes that `add_mesh` adds with an image, or existing ones, found by their labels.

    For a mesh with an image a MonarchMesh resource is made, or a StatefulSet where no operator knows these; the job's
    key is a Secret that the pods mount, and `kill()` deletes all three. Pods that existed before stay.
    Without `kubeconfig` this process runs in the cluster itself. From outside, one pod is reached by `kubectl
    port-forward`, or at `attach_to` (such as "tcp://127.0.0.1:26600", a port that you forward), and the others through
    that one. `timeout` seconds after `state()` the job is given up (None: never).
    Needs `pip install 'monarch-nb[kubernetes]'`. Raises EngineError, with the API's message.
    """

    def __init__(
        self, namespace: str, timeout: float | None = None, kubeconfig: KubeConfig | None = None,
        attach_to: str | None = None, *, env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        config = kubeconfig or KubeConfig()
        options: dict[str, Any] = {"namespace": namespace, "kubeconfig": config.saved(), "meshes": {}}
        if attach_to is not None:
            options["attach_to"] = attach_to
        if config.out_of_cluster:
            options["through_first"] = True
        super().__init__("kubernetes", {}, env, options=options, patience=timeout)

    def add_mesh(
        self, name: str, num_replicas: int, label_selector: str | None = None, pod_rank_label: str = RANK_LABEL,
        image_spec: ImageSpec | None = None, port: int = 26600, pod_template: object = None,
        labels: Mapping[str, str] | None = None, annotations: Mapping[str, str] | None = None, *,
        secret: str | None = None, spares: int = 0,
    ) -> None:  # fmt: skip
        """Adds a mesh of so many pods, of ranks 0 to `num_replicas` - 1; the `spares` have the ranks after these.

        With `image_spec`, or a `pod_template` (a V1PodTemplateSpec, or the same as plain data), the pods are made, with
        `labels` and `annotations` on the resource. Else they are found by `label_selector`, by default the labels of a
        MonarchMesh of that name, and ordered by `pod_rank_label`; their key is in the Secret `secret`, by default
        NAME-monarch-key. Raises ValueError for a name that Kubernetes would refuse, and for contradictory arguments.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot name a mesh of pods: at most 63 lowercase letters and digits, a letter first"
            )
        if image_spec is not None and image_spec.run_as_user == 0 and not image_spec.enable_fuse:
            raise ValueError("run_as_user=0: pods of an image do not run as root; give a pod_template for such pods")
        provisioned = image_spec is not None or pod_template is not None
        if image_spec is not None and pod_template is not None:
            raise ValueError("image_spec and pod_template are two ways to say the same: give one of them")
        if provisioned and (label_selector is not None or pod_rank_label != RANK_LABEL or secret is not None):
            raise ValueError("label_selector, pod_rank_label and secret are of pods that are there; these are made")
        if not provisioned and (labels is not None or annotations is not None):
            raise ValueError("labels and annotations are of what is made; these pods are there")
        if self.active:
            raise ValueError("the job runs: a mesh can only be added before")
        config: dict[str, Any] = {
            "provisioned": provisioned, "selector": label_selector or selector_of(name), "rank_label": pod_rank_label,
            "port": port, "labels": dict(labels or {}), "annotations": dict(annotations or {}), "secret": secret,
        }  # fmt: skip
        if image_spec is not None:
            config.update(image=image_spec.image, resources=dict(image_spec.resources or {}),
                          enable_fuse=image_spec.enable_fuse, run_as_user=image_spec.run_as_user,
                          shared_memory_size=image_spec.shared_memory_size)  # fmt: skip
        if pod_template is not None:
            config["pod_template"] = _plain(pod_template)
        self._options = {**self._options, "meshes": {**self._options["meshes"], name: config}}
        self._wish({**{mesh: self._role(mesh) for mesh in self._meshes}, name: Role(hosts=num_replicas, spares=spares)})


def _plain(template: object) -> dict[str, object]:
    if isinstance(template, Mapping):
        return dict(template)
    client = importlib.import_module("kubernetes.client")
    data: dict[str, object] = client.ApiClient().sanitize_for_serialization(template)
    return data


register_job("kubernetes", lambda: importlib.import_module("monarch_nb.job.kubernetes.adapter").Kubernetes())

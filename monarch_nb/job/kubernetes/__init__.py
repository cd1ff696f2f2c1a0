"""Jobs on pods of a Kubernetes cluster."""

from monarch_nb.job.kubernetes.config import KubeConfig
from monarch_nb.job.kubernetes.job import ImageSpec, KubernetesJob

__all__ = ["ImageSpec", "KubeConfig", "KubernetesJob"]

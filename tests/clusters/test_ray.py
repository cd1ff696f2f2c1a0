"""Jobs on a real Ray cluster of four nodes, all on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.actors import grow_with_another_key
from tests.clusters.console import Console

pytest.importorskip("ray", reason="NOT TESTED HERE: pip install 'monarch-nb[ray]'")
pytestmark = [pytest.mark.clusters, pytest.mark.slow, pytest.mark.timeout(300)]
START = """
import ray
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 2, 'include_dashboard': False})
for _ in range(3): cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, namespace='monarch-nb', log_to_driver=False, logging_level='ERROR')
from monarch_nb.job import RayJob
job = RayJob({'trainers': 2}, env={'MONARCH_NB_PRELOAD': ''})
"""


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    settings = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    instance = Console(tmp_path, XDG_STATE_HOME=str(tmp_path / "state"), **settings)
    instance.ask(START, 120)
    yield instance
    instance.ask("job.kill()\nray.shutdown()\ncluster.shutdown()", 120)
    instance.close()


def test_hosts_of_ray_get_another_key_while_they_work(console: Console) -> None:
    grow_with_another_key(console)

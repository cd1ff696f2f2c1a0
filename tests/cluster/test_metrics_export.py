"""Metrics of ranks, written by the controller to targets of the test, and to real packages if installed."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import monarch_nb.telemetry
from monarch_nb.actor import Actor, ProcMesh, current_rank, endpoint
from monarch_nb.telemetry import exports
from monarch_nb.telemetry.verbs import MetricPoint
from tests.polling import until

pytestmark = pytest.mark.timeout(120)


class Learner(Actor):
    @endpoint
    def learn(self, *steps: int) -> None:
        for step in steps:
            monarch_nb.telemetry.log(step=step, loss=step + 10 * current_rank().rank)


class Target:
    """A target of the test, which fails while `broken` is set."""

    def __init__(self, name: str, broken: str = "") -> None:
        self.name, self.broken, self.closed = name, broken, False
        self.values: list[tuple[str, str, float | None, float]] = []

    def write(self, points: Sequence[tuple[str, MetricPoint]]) -> None:
        if self.broken:
            raise OSError(28, self.broken)
        self.values += [(rank, point.name, point.step, point.value) for rank, point in points]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> list[Target]:
    """The targets that exports created."""
    targets: list[Target] = []

    def make(name: str, **options: Any) -> Target:
        targets.append(Target(name, **options))
        return targets[-1]

    monkeypatch.setitem(exports.TARGETS, "test", make)
    return targets


def test_former_and_later_values_are_written_once_by_rank(own_procs: ProcMesh, targets: list[Target]) -> None:
    learners = own_procs.spawn("learners", Learner)
    learners.learn.call(1).get()
    assert len(learners.metrics) == 1  # they have arrived
    with learners.metrics.export("test") as export:
        learners.learn.call(2, 3).get()
    [target] = targets
    assert target.closed
    assert target.name == "learners"
    expected = [(f"gpus={rank}", "loss", step, step + 10.0 * rank) for rank in range(2) for step in (1, 2, 3)]
    assert sorted(target.values) == sorted(expected)
    learners.learn.call(4).get()
    export.close()
    assert len(target.values) == 6
    assert repr(export) == "<export of learners's metrics to test: 6 values written, closed>"


@pytest.mark.parametrize("of", ["actors", "processes"])
def test_values_of_the_last_call_before_a_stop_are_written(own_procs: ProcMesh, targets: list[Target], of: str) -> None:
    learners = own_procs.spawn("learners", Learner)
    export = (learners if of == "actors" else own_procs).metrics.export("test")
    learners.learn.call(1, 2).get()
    (learners if of == "actors" else own_procs).stop().get()
    until(lambda: targets[0].closed)
    assert sorted((rank, step) for rank, _, step, _ in targets[0].values) == [
        (f"gpus={rank}", step) for rank in range(2) for step in (1, 2)
    ]
    assert export.written == 4


def test_an_export_of_processes_has_actors_that_come_later(own_procs: ProcMesh, targets: list[Target]) -> None:
    with own_procs.slice(gpus=1).metrics.export("test"):
        own_procs.spawn("learners", Learner).learn.call(7).get()
    assert targets[0].values == [("", "loss", 7, 17.0)]


def test_an_export_ends_with_its_mesh(own_procs: ProcMesh, targets: list[Target]) -> None:
    own_procs.spawn("learners", Learner).metrics.export("test")
    own_procs.stop().get()
    until(lambda: targets[0].closed)


def test_a_failed_write_is_reported_once_and_later_ones_are_tried(
    own_procs: ProcMesh, targets: list[Target], caplog: pytest.LogCaptureFixture
) -> None:
    learners = own_procs.slice(gpus=0).spawn("learners", Learner)
    export = learners.metrics.export("test", broken="no space is left")
    for step in (1, 2):
        learners.learn.call(step).get()
        assert learners.metrics.latest()["loss"][0] == step
    until(lambda: bool(export.error))
    assert "failed: OSError: [Errno 28] no space is left" in repr(export)
    targets[0].broken = ""
    learners.learn.call(3).get()
    export.close()
    assert targets[0].values[-1] == ("", "loss", 3, 3.0)
    assert [record.message.partition(":")[0] for record in caplog.records if "metrics of" in record.message] == [
        "metrics of learners are not written to test"
    ]


def test_an_unknown_target_and_a_missing_package_are_named(
    own_procs: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    learners = own_procs.spawn("learners", Learner)
    with pytest.raises(ValueError, match="the targets are tensorboard, wandb, mlflow"):
        learners.metrics.export("tensorbord")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"export\('wandb'\) needs wandb: pip install wandb"):
        learners.metrics.export("wandb")


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from monarch_nb.actor import this_host
from tests.cluster.test_metrics_export import Learner
learners = this_host().spawn_procs(per_host={{"gpus": 2}}, name="workers").spawn("learners", Learner)
learners.learn.call(1).get()
with learners.metrics.export({target!r}, **{options!r}) as export:
    learners.learn.call(2, 3).get()
print(export.written, export.error)
"""
READ = {
    "tensorboard": """
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
for folder in Path("runs/learners").iterdir():
    events = EventAccumulator(str(folder))
    events.Reload()
    table[folder.name] = [[event.step, event.value] for event in events.Scalars("loss")]
""",
    "wandb": """
from pathlib import Path
[file] = Path("wandb").glob("offline-run-*/run-*.wandb")
import struct
from wandb.proto import wandb_internal_pb2
data, offset, message = file.read_bytes(), 7, b""  # a log as LevelDB's, in blocks of 32 kB
while offset + 7 <= len(data):
    if 32768 - offset % 32768 < 7:
        offset += 32768 - offset % 32768
        continue
    _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
    message += data[offset + 7 : offset + 7 + length]
    offset += 7 + length
    if kind not in (1, 4):  # whole, or the last part
        continue
    record, message = wandb_internal_pb2.Record.FromString(message), b""
    row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
    for name, value in row.items():
        if name.startswith("loss/"):
            table.setdefault(name.removeprefix("loss/"), []).append([row["step"], value])
""",
    "mlflow": """
import mlflow
client = mlflow.MlflowClient()
[run] = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
assert run.info.status == "FINISHED", run.info.status
for name in run.data.metrics:
    rank = name.removeprefix("loss/").replace("-", "=")
    table[rank] = [[point.step, point.value] for point in client.get_metric_history(run.info.run_id, name)]
""",
}
OPTIONS = {"tensorboard": {}, "wandb": {"project": "trial"}, "mlflow": {"experiment": "trial"}}


@pytest.mark.parametrize("target", READ)
def test_real_packages_have_the_values_of_each_rank(tmp_path: Path, target: str) -> None:
    if importlib.util.find_spec(target) is None:
        pytest.skip(f"NOT TESTED HERE: {target} is not installed: make test-loggers")
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true",
    }  # fmt: skip
    program = PROGRAM.format(tests=os.getcwd(), target=target, options=OPTIONS[target])
    read = f"import json\ntable = {{}}\n{READ[target]}\nprint(json.dumps(table))"
    outputs = []
    for source in (program, read):
        done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, env=env, capture_output=True, text=True,
                              timeout=100, check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout.splitlines())
    assert "6 " in outputs[0], outputs
    series = {rank: sorted(values) for rank, values in json.loads(outputs[1][-1]).items()}
    assert series == {f"gpus={rank}": [[step, step + 10 * rank] for step in (1, 2, 3)] for rank in (0, 1)}

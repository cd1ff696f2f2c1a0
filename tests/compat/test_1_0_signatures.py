"""Sections 1.2 to 1.14: every signature, with the kinds, order and defaults of its parameters.

Further parameters of ours are keyword-only and optional.
"""

import importlib
import inspect
import logging
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)

SIGNATURES = """
actor.endpoint(method=None, *, propagate=None, explicit_response_port=False, instrument=True)
actor.concurrent_endpoint(method=None, *, propagate=None, explicit_response_port=False, instrument=True)
actor.as_endpoint(not_an_endpoint, *, propagate=None, explicit_response_port=False)
actor.send(endpoint, args, kwargs, port=None, selection='all')
actor.Actor.__supervise__(self, failure)
actor.Actor.__cleanup__(self, exc)
actor.Actor._handle_undeliverable_message(self, message)
actor.Actor.slice(self, **kwargs)
actor.ActorMesh.split(self, **kwargs)
actor.ActorMesh.rename(self, **kwargs)
actor.ActorMesh.flatten(self, name)
actor.ActorMesh.size(self, dim=None)
actor.HostMesh.slice(self, **kwargs)
actor.HostMesh.size(self, dim=None)
actor.ProcMesh.slice(self, **kwargs)
actor.ProcMesh.flatten(self, name)
actor.ValueMesh.slice(self, **kwargs)
actor.Extent(labels, sizes)
actor.Point(rank, extent)
actor.Point.size(self, label)
actor.HostMesh.spawn_procs(self, per_host=None, bootstrap=None, name=None, proc_bind=None, bootstrap_command=None)
actor.HostMesh.with_python_executable(self, python_executable)
actor.HostMesh.shutdown(self)
actor.HostMesh.stop(self)
actor.HostMesh.sync_workspace(self, workspace, conda=False, auto_reload=False)
actor.ProcMesh.spawn(self, name, Class, *args, **kwargs)
actor.ProcMesh.logging_option(self, stream_to_client=False, aggregate_window_sec=None, level=logging.INFO)
actor.ProcMesh.stop(self, reason='stopped by client')
actor.ActorMesh.stop(self, reason='stopped by client')
actor.ValueMesh(shape, values)
actor.ValueMesh.item(self, **kwargs)
actor.ValueMesh.get(self, rank)
actor.BootstrapCommand(program, arg0, args, env, inherit_env=True)
actor.BootstrapCommand.with_env(self, env)
actor.default_bootstrap_cmd()
actor.Future.get(self, timeout=None)
actor.Future.result(self, timeout=None)
actor.Future.exception(self, timeout=None)
actor.Future.as_asyncio(self)
actor.Channel.open(once=False)
actor.Channel.open_ranked(once=False)
actor.Port.send(self, obj)
actor.Port.exception(self, obj)
actor.PortReceiver.recv(self)
actor.PortReceiver.ranked(self)
actor.context()
actor.current_rank()
actor.current_size()
actor.current_actor_name()
actor.this_host()
actor.this_proc()
actor.run_worker_loop_forever(*, private_key=None, ca, address)
actor.run_worker_loop_until_shutdown(*, private_key=None, ca, address)
actor.start_worker_loop_forever(*, private_key=None, ca, address)
actor.attach_to_workers(*, private_key=None, ca, workers, name=None)
actor.attach(addr)
actor.enable_transport(transport)
actor.shutdown_context(host_timeout=None)
actor.get_or_spawn_controller(name, Class, *args, **kwargs)
actor.debug_controller()
actor.ActorError(exception, message='A remote actor call has failed.')
actor.MeshFailure.report(self)
actor.Accumulator(endpoint, identity, combine)
actor.Accumulator.accumulate(self, *args, **kwargs)
config.configure(**kwargs)
config.configured(**kwargs)
config.get_global_config()
config.get_runtime_config()
config.clear_runtime_config()
job.JobTrait.apply(self, client_script=None)
job.JobTrait.state(self, cached_path='.monarch/job_state.pkl')
job.JobTrait.kill(self)
job.JobTrait.dumps(self)
job.LocalJob(hosts=('hosts',))
job.ProcessJob(meshes, env=None)
job.TelemetryConfig(retention_secs=3600, include_dashboard=False, dashboard_port=8265, snapshot_interval_secs=30.0)
job.MeshAdminConfig(admin_addr=None)
job.hosts_from_config(name)
job.load_current_job()
spmd.setup_torch_elastic_env(proc_mesh, master_addr=None, master_port=None, use_ipaddr=None)
spmd.setup_torch_elastic_env_async(proc_mesh, master_addr=None, master_port=None, use_ipaddr=None)
"""
LINES = SIGNATURES.split("\n")[1:-1]
# A pickle in torchmonarch, JSON here; output is shown unless it is switched off. See docs/compatibility.md.
OTHER_DEFAULTS = {"job.JobTrait.state": "cached_path", "actor.ProcMesh.logging_option": "stream_to_client"}


def signature_of(line: str) -> inspect.Signature:
    scope: dict[str, Any] = {"logging": logging}
    exec(f"def f{line[line.index('(') :]}: ...", scope)
    return inspect.signature(scope["f"])


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition("(")[0])
def test_parameters_are_as_programs_give_them(line: str) -> None:
    name = line.partition("(")[0]
    module, *parts = name.split(".")
    target: Any = importlib.import_module(f"monarch.{module}")
    for part in parts:
        target = inspect.getattr_static(target, part) if part.startswith("_") else getattr(target, part)
    ours = {arg.name: arg for arg in inspect.signature(target).parameters.values() if arg.name != "self"}
    theirs = {arg.name: arg for arg in signature_of(line).parameters.values() if arg.name != "self"}
    more = [arg for arg in ours.values() if arg.name not in theirs and arg.kind is arg.KEYWORD_ONLY]
    assert all(arg.default is not arg.empty for arg in more)
    common = [arg for arg in ours.values() if arg not in more]
    assert [_shape(arg) for arg in common] == [_shape(arg) for arg in theirs.values()]
    for arg in common:
        if arg.name in theirs and theirs[arg.name].default is not arg.empty and OTHER_DEFAULTS.get(name) != arg.name:
            assert arg.default == theirs[arg.name].default, arg.name


def _shape(arg: inspect.Parameter) -> tuple[str, str]:
    return "**" if arg.kind is arg.VAR_KEYWORD else arg.name, arg.kind.name

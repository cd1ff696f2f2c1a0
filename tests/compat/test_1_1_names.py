"""Section 1.1: names. Which there are: tests/unit/test_names.py; here: as programs import and call them."""

import importlib
import inspect
from typing import Any

import pytest

import monarch
import monarch.actor

pytestmark = pytest.mark.timeout(120)

_TEXT = (
    "Accumulator Actor ActorError current_actor_name as_endpoint current_rank current_size "
    "concurrent_endpoint endpoint Future returns_future Point ProcMesh ProcId Channel send "
    "shutdown_context ValueMesh debug_controller get_or_spawn_controller this_host this_proc "
    "default_bootstrap_cmd HostMesh context Port PortReceiver Endpoint Extent run_worker_loop_forever "
    "run_worker_loop_until_shutdown start_worker_loop_forever attach_to_workers "
    "attach enable_transport "
    "Context ChannelTransport unhandled_fault_hook MeshFailure config get_meter span traced Uid "
)
NAMES = _TEXT.split()

# What can be given by name, in the order in which it can be given by place.
PARAMETERS = {
    "as_endpoint": "not_an_endpoint propagate explicit_response_port",
    "attach": "addr",
    "attach_to_workers": "private_key ca workers name",
    "concurrent_endpoint": "method propagate explicit_response_port instrument",
    "endpoint": "method propagate explicit_response_port instrument",
    "enable_transport": "transport",
    "get_or_spawn_controller": "name Class args kwargs",
    "run_worker_loop_forever": "private_key ca address",
    "run_worker_loop_until_shutdown": "private_key ca address",
    "send": "endpoint args kwargs port selection",
    "shutdown_context": "host_timeout",
    "start_worker_loop_forever": "private_key ca address",
    "Accumulator": "endpoint identity combine",
    "Actor.__cleanup__": "exc",
    "Actor.__supervise__": "failure",
    "ActorError": "exception message",
    "ActorMesh.stop": "reason",
    "BootstrapCommand": "program arg0 args env inherit_env",
    "Channel.open": "once",
    "Channel.open_ranked": "once",
    "Extent": "labels sizes",
    "Future.exception": "timeout",
    "Future.get": "timeout",
    "Future.result": "timeout",
    "HostMesh.spawn_procs": "per_host bootstrap name proc_bind bootstrap_command",
    "HostMesh.sync_workspace": "workspace conda auto_reload",
    "HostMesh.with_python_executable": "python_executable",
    "Point": "rank extent",
    "ProcMesh.logging_option": "stream_to_client aggregate_window_sec level",
    "ProcMesh.spawn": "name Class args kwargs",
    "ProcMesh.stop": "reason",
    "ValueMesh": "shape values",
}


@pytest.mark.parametrize("name", NAMES)
def test_from_import_finds_what_programs_name(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"from monarch.actor import {name}", scope)
    assert scope[name] is getattr(monarch.actor, name)


def test_a_star_import_brings_all_of_them() -> None:
    scope: dict[str, Any] = {}
    exec("from monarch.actor import *", scope)
    assert set(NAMES) - scope.keys() == set()


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameters_have_the_names_and_the_order_that_programs_use(name: str) -> None:
    found: Any = monarch.actor
    for part in name.split("."):
        found = getattr(found, part)
    names = [parameter for parameter in inspect.signature(found).parameters if parameter != "self"]
    wanted = PARAMETERS[name].split()
    assert names[: len(wanted)] == wanted
    left = [inspect.signature(found).parameters[more] for more in names[len(wanted) :]]
    assert all(more.kind is more.KEYWORD_ONLY and more.default is not more.empty for more in left)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("monarch._rust_bindings.monarch_hyperactor.supervision", "SupervisionError"),
        ("monarch._rust_bindings.monarch_hyperactor.handle", "WouldBlockRuntime"),
        ("monarch._rust_bindings.monarch_hyperactor.mailbox", "UndeliverableMessageEnvelope"),
        ("monarch._rust_bindings.monarch_hyperactor.shape", "Region"),
        ("monarch._src.actor.actor_mesh", "ActorMesh"),
        ("monarch._src.actor.host_mesh", "BootstrapCommand"),
        ("monarch._src.actor.shape", "NDSlice"),
    ],
)
def test_hidden_upstream_names_are_the_same_objects_in_public(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is getattr(monarch.actor, name)


def test_no_name_of_torchmonarch_is_left_out_here() -> None:
    assert len(NAMES) == len(set(NAMES)) == 44


def test_modules_are_reached_as_attributes_of_the_package() -> None:
    assert monarch.actor.Actor is importlib.import_module("monarch.actor").Actor
    assert monarch.Extent is monarch.actor.Extent


@pytest.mark.parametrize("module", ["monarch.world_mesh", "monarch._src.actor.proc_launcher"])
def test_private_modules_that_are_not_there_yet_say_so(module: str) -> None:
    with pytest.raises(ImportError, match="not part of Monarch-NB yet"):
        importlib.import_module(module)

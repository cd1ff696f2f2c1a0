"""Workers at an address, and programs that attach to them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import (
    AttachError,
    Channel,
    Future,
    HostMesh,
    SupervisionError,
    attach_to_workers,
    local_hosts,
    returns_future,
    run_worker_loop_forever,
    start_worker_loop_forever,
)
from monarch_nb.compat import worker_loops
from monarch_nb.config import configured
from monarch_nb.exceptions import AgentStartError, TrustError
from monarch_nb.job import new_service_proc_id
from monarch_nb.mesh import give_up
from monarch_nb.routing.routes import AddressError
from monarch_nb.transport import Keys, TransportError
from tests.cluster.fault_tools import ROOT, SOON
from tests.cluster.worker_tools import (
    TRUST_ALL,
    light_host,  # noqa: F401 - a fixture
    short_folder,
    start_worker,
    where,
    workers_at,
)
from tests.polling import until
from tests.ports import free_port, free_ports
from tests.processes import alive

pytestmark = [pytest.mark.long, pytest.mark.timeout(120), pytest.mark.usefixtures("host")]


@pytest.fixture
def folder() -> Any:
    with short_folder() as path:
        yield path


def attach(*workers: Any, **more: Any) -> HostMesh:
    return attach_to_workers(ca=TRUST_ALL, workers=list(workers), **more)


@pytest.mark.slow
def test_workers_on_ipc_are_attached_stopped_used_again_and_shut_down(folder: Path) -> None:
    addresses = [f"ipc://{folder}/w{number}" for number in range(2)]
    hosts = attach(*addresses, name="pool")  # before they listen
    assert dict(hosts.extent) == {"hosts": 2}
    assert not hosts.initialized.done()
    with workers_at(*addresses) as processes:
        assert hosts.initialized.get(30) is True
        first = where(hosts.spawn_procs(per_host={"gpus": 2})).pid.call().get(30).values()
        assert len(set(first)) == 4
        hosts.stop().get(SOON)
        until(lambda: not any(alive(pid) for pid in first), "the end of what ran")
        assert all(process.poll() is None for process in processes)
        again = attach(*addresses)
        assert again == hosts
        assert set(where(again.spawn_procs()).pid.call().get(30).values()).isdisjoint(first)
        hosts.shutdown().get(SOON)
        assert [process.wait(SOON) for process in processes] == [0, 0]
        assert list(folder.iterdir()) == []
        with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
            hosts.spawn_procs()


@pytest.mark.slow
def test_ids_of_earlier_launchers_are_taken(folder: Path) -> None:
    address, proc_id = f"ipc://{folder}/w", new_service_proc_id()
    program = (
        "from monarch._rust_bindings.monarch_hyperactor.proc import ProcId\n"
        "from monarch.actor import run_worker_loop_forever\n"
        f"proc_id = ProcId.from_string({str(proc_id)!r})\n"
        f"run_worker_loop_forever(address={address!r}, service_proc_id=proc_id, ca={TRUST_ALL!r})"
    )
    with pytest.raises(ValueError, match="2 ids for 1 workers"):
        attach(address, service_proc_ids=[proc_id] * 2)
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as process:
        hosts = attach(address, service_proc_ids=[proc_id])
        assert hosts.initialized.get(30) is True
        hosts.shutdown().get(SOON)
        assert process.wait(SOON) == 0


@pytest.mark.slow
def test_slices_and_copies_neither_stop_nor_shut_down(folder: Path) -> None:
    address = f"ipc://{folder}/w"
    with workers_at(address):
        hosts = attach(address)
        for part in (hosts.slice(hosts=0), hosts.slice(hosts=slice(0, 1))):
            with pytest.raises(RuntimeError, match="cannot shut down `HostMesh` that is a reference instead of owned"):
                part.shutdown()
            with pytest.raises(RuntimeError, match="cannot stop `HostMesh` that is a reference instead of owned"):
                part.stop()

        async def main() -> None:
            async with hosts as same:
                assert same is hosts
                assert await hosts.initialized
            with pytest.raises(RuntimeError, match="shut down"):
                async with hosts:
                    raise AssertionError("not reached")

        asyncio.run(main())


@pytest.mark.slow
def test_a_key_lets_its_holders_in_over_tcp_and_nobody_else(folder: Path) -> None:
    key, other_key = Keys.load_or_create(folder / "job.key"), Keys.create()
    address = f"tcp://localhost:{free_port()}"
    with workers_at(address, key=key.to_text()):
        hosts = attach(address, private_key=folder / "job.key")
        assert hosts.initialized.get(30) is True
        for wrong in (None, other_key.to_text()):
            with pytest.raises((TrustError, AttachError), match="key"):
                attach(address, private_key=wrong).initialized.get(30)
        assert len(where(hosts.spawn_procs(per_host={"x": 2})).pid.call().get(30)) == 2
        hosts.shutdown().get(SOON)


@pytest.mark.slow
def test_an_alias_for_all_interfaces_binds_loopback_without_a_key() -> None:
    ports = free_ports(2)
    addresses = [
        f"tcp://127.0.0.1:{ports[0]}@tcp://0.0.0.0:{ports[0]}",
        f"service<2MuA>@tcp://localhost:{ports[1]}@tcp://0.0.0.0:{ports[1]}",  # the id of a process is no hindrance
    ]
    with workers_at(*addresses):
        hosts = attach(*addresses)
        assert len(where(hosts.spawn_procs()).pid.call().get(30)) == 2
        for port in ports:
            socket.create_connection(("127.0.0.1", port), timeout=SOON).close()
            with pytest.raises(ConnectionRefusedError):  # which reaches 0.0.0.0
                socket.create_connection(("127.0.0.2", port), timeout=SOON)
        hosts.shutdown().get(SOON)


EMBEDDED = """
import atexit, os, signal, sys, time
from monarch.actor import attach_to_workers
def handle(number, frame): print("handled", flush=True)
signal.signal(signal.SIGTERM, handle)
if sys.argv[1] == "public":
    from monarch.actor import start_worker_loop_forever
    started = start_worker_loop_forever(ca="trust_all_connections", address=sys.argv[2])
else:
    from monarch._rust_bindings.monarch_hyperactor.bootstrap import start_worker_loop_forever
    started = start_worker_loop_forever(sys.argv[2])
del started
atexit.register(print, "tidied up")
hosts = attach_to_workers(ca="trust_all_connections", workers=[sys.argv[2]])
hosts.initialized.get(30)
os.kill(os.getpid(), signal.SIGTERM)
hosts.shutdown().get(30)
time.sleep(30)
sys.exit(3)
"""


@pytest.mark.parametrize("access", ["public", pytest.param("private", marks=pytest.mark.slow)])
def test_a_worker_program_keeps_its_signals_and_ends_with_its_host(access: str) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/kernel_ext"}
    command = [sys.executable, "-c", EMBEDDED, access, f"tcp://127.0.0.1:{free_port()}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "handled\ntidied up\n", "")


def test_workers_that_cannot_listen_or_have_wrong_addresses_say_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        started = start_worker_loop_forever(ca=TRUST_ALL, address=f"tcp://127.0.0.1:{port}")
        with pytest.raises(AgentStartError) as caught:
            started.get(1)
        assert str(caught.value).endswith(f"It said:\ncannot listen on tcp://127.0.0.1:{port}: Address already in use")
        private = worker_loops.start_worker_loop_forever(f"service<2MuA>@tcp://127.0.0.1:{port}")
        with pytest.raises(ValueError, match=f"listen: (?s:.*)127.0.0.1:{port}.* in use") as raised:
            private.get(1)
        assert type(raised.value) is ValueError
    for start in (worker_loops.start_worker_loop_forever, worker_loops.start_worker_loop_until_shutdown):
        with pytest.raises(ValueError, match="does not begin with a transport"):
            start("nonsense")


@pytest.mark.slow
def test_a_worker_listens_on_a_socket_that_it_is_given() -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port, fd = door.getsockname()[1], door.fileno()
        worker = start_worker(f"tcp://127.0.0.1:fd{fd}", pass_fds=(fd,))
    try:
        hosts = attach(f"tcp://127.0.0.1:{port}")
        assert len(where(hosts.spawn_procs(per_host={"x": 2})).pid.call().get(30)) == 2
        hosts.shutdown().get(SOON)
        assert worker.wait(SOON) == 0
        with pytest.raises(ConnectionRefusedError):  # nobody holds it any more
            socket.create_connection(("127.0.0.1", port), timeout=SOON)
    finally:
        worker.kill()
        worker.wait()


def test_a_socket_that_others_reach_needs_a_key_whatever_its_address() -> None:
    with socket.socket() as door, pytest.raises(TransportError, match="not a TCP socket that is bound"):
        run_worker_loop_forever(ca=TRUST_ALL, address=f"tcp://127.0.0.1:fd{door.fileno()}")
    with pytest.raises(TransportError, match="descriptor 999999 is not a socket"):
        run_worker_loop_forever(ca=TRUST_ALL, address="tcp://127.0.0.1:fd999999")
    with socket.socket() as door:
        door.bind(("0.0.0.0", 0))
        with pytest.raises(TrustError, match=r"tcp://0\.0\.0\.0:\d+ needs a key"):
            run_worker_loop_forever(ca=TRUST_ALL, address=f"tcp://127.0.0.1:fd{door.fileno()}")


def test_without_a_key_only_this_machine_can_be_trusted() -> None:
    with pytest.raises(TrustError, match=r"tcp://0\.0\.0\.0:4444 needs a key.*loopback.*load_or_create"):
        run_worker_loop_forever(ca=TRUST_ALL, address="tcp://example.org:4444@tcp://0.0.0.0:4444")
    with pytest.raises(TrustError, match=r"tcp://10\.1\.2\.3:4444 needs a key"):
        attach("tcp://10.1.2.3:4444")
    with pytest.raises(TrustError, match="is not one of"):
        attach_to_workers(ca="trust_some", workers=["ipc:///x"])  # type: ignore[arg-type]
    with pytest.raises(TrustError, match="there is no key file"):
        attach_to_workers(private_key=Path("/no/such.key"), ca=TRUST_ALL, workers=["ipc:///x"])


def test_addresses_that_cannot_work_are_refused_at_once() -> None:
    with pytest.raises(NotImplementedError, match=r"tcp://its-name:4444@tcp://0\.0\.0\.0:4444"):
        run_worker_loop_forever(ca=TRUST_ALL, address="tcp://*:4444")
    with pytest.raises(AddressError, match="does not begin with a transport"):
        attach("localhost:4444")
    with pytest.raises(ValueError, match="more than once"):
        attach("ipc:///x", "ipc:///x")
    with pytest.raises(ValueError, match="takes a list"):
        attach_to_workers(ca=TRUST_ALL, workers="ipc:///x")
    with pytest.raises(AddressError, match="is a text, not int"):
        attach_to_workers(ca=TRUST_ALL, workers=[5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least 1"):
        local_hosts(0)


def test_a_worker_that_nobody_started_is_named(folder: Path) -> None:
    with configured(mesh_attach_config_timeout="300ms"):
        hosts = attach(f"ipc://{folder}/nobody", f"tcp://127.0.0.1:{free_port()}")
        with pytest.raises(AttachError, match=r"(?s)2 of 2.*nobody.*nobody listens at tcp://127"):
            hosts.initialized.get(10)
        with pytest.raises(AttachError, match="nobody"):
            hosts.spawn_procs()


def test_workers_that_were_given_up_are_waited_for_no_longer(folder: Path) -> None:
    hosts = attach(f"ipc://{folder}/nobody", f"tcp://127.0.0.1:{free_port()}")
    give_up(hosts, "its job has ended")
    with pytest.raises(AttachError, match=r"(?s)2 of 2.*given it up"):
        hosts.initialized.get(5)


@pytest.mark.slow
def test_addresses_may_be_futures_of_any_kind(folder: Path) -> None:
    addresses = [f"ipc://{folder}/w{number}" for number in range(3)]
    port, receiver = Channel[str].open()

    @returns_future
    async def tell() -> str:
        await asyncio.sleep(0)
        return addresses[0]

    async def private() -> str:
        return addresses[1]

    hosts = attach(tell(), Future._from_coro(private()), receiver.recv())
    with workers_at(*addresses):
        port.send(addresses[2])
        assert hosts.initialized.get(30) is True
        assert len(where(hosts.spawn_procs()).pid.call().get(30)) == 3
        hosts.shutdown().get(SOON)


@pytest.mark.slow
def test_a_killed_worker_is_a_lost_host_that_can_be_replaced(folder: Path, shown: list[Any]) -> None:
    address = f"ipc://{folder}/w"
    with workers_at(address) as processes:
        hosts = attach(address)
        actor = where(hosts.spawn_procs())
        pid = actor.pid.call().get(30).values()[0]
        processes[0].send_signal(signal.SIGKILL)
        processes[0].wait(SOON)
        until(lambda: not alive(pid), "the end of its processes")
        with pytest.raises(
            SupervisionError, match=r"host .* was lost: .*: the process that had started the host agent has ended"
        ):
            actor.pid.call().get(SOON)
        until(lambda: not (folder / "w").exists(), "the end of its agent")
        with workers_at(address):
            second = attach(address)
            assert where(second.spawn_procs()).pid.call().get(30).values() != [pid]
            second.shutdown().get(SOON)


@pytest.mark.slow
def test_a_path_in_use_is_not_taken_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_nb.connect.worker_loop._ENDING_S", 0.1)
    address = f"ipc://{folder}/w"
    with workers_at(address):
        attach(address).initialized.get(30)
        with pytest.raises(OSError, match="a worker listens there already"):
            run_worker_loop_forever(ca=TRUST_ALL, address=address)
    (folder / "file").write_text("mine")
    with pytest.raises(OSError, match="another file"):
        run_worker_loop_forever(ca=TRUST_ALL, address=f"ipc://{folder}/file")


CLIENT = """
import os, sys
from monarch_nb.actor import Actor, attach_to_workers, endpoint
class A(Actor):
    @endpoint
    def pid(self): return os.getpid()
procs = attach_to_workers(ca="trust_all_connections", workers=[sys.argv[1]]).spawn_procs()
print(*procs.spawn("a", A).pid.call().get(30).values(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_client_leaves_nothing_on_workers_that_live_on(folder: Path) -> None:
    address = f"ipc://{folder}/w"
    with workers_at(address) as processes:
        command = [sys.executable, "-c", CLIENT, address]
        env = {**os.environ, "PYTHONPATH": ROOT, "XDG_RUNTIME_DIR": str(folder)}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as client:
            assert client.stdout is not None
            pid = int(client.stdout.readline())
            client.kill()
        until(lambda: not alive(pid), "the end of the client's process")
        assert processes[0].poll() is None
        hosts = attach(address)
        assert hosts.initialized.get(30) is True
        hosts.shutdown().get(SOON)


@pytest.mark.slow
def test_a_terminated_worker_or_its_successor_removes_its_link(folder: Path) -> None:
    address = f"ipc://{folder}/w"
    process = start_worker(address)
    until((folder / "w").exists, "the worker")
    process.kill()
    process.wait(SOON)
    until(lambda: not (folder / "w").exists(), "the end of its agent")
    with workers_at(address):
        hosts = attach(address)
        assert hosts.initialized.get(30) is True
        hosts.shutdown().get(SOON)


def test_the_pod_script_runs_a_worker_with_its_secrets_key(tmp_path: Path) -> None:
    from monarch._src.job.kubernetes import _WORKER_BOOTSTRAP_SCRIPT

    key, port = tmp_path / "key", free_port()
    Keys.load_or_create(key)
    env = {**os.environ, "MONARCH_PORT": str(port), "MONARCH_KEY_FILE": str(key)}
    with subprocess.Popen([sys.executable, "-u", "-c", _WORKER_BOOTSTRAP_SCRIPT], env=env) as pod:
        hosts = attach_to_workers(ca="trust_all_connections", private_key=key, workers=[f"tcp://127.0.0.1:{port}"])
        hosts.initialized.get(SOON)
        hosts.shutdown().get(SOON)
        assert pod.wait(SOON) == 0

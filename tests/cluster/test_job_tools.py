"""Commands, shells and forwarded ports on hosts."""

import contextlib
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import ActorError, this_proc
from monarch_nb.job import PortForwarder, exec_command, shell
from monarch_nb.supervision import SupervisionError
from tests.cluster.fault_tools import ROOT, SOON, spawned
from tests.polling import until
from tests.ports import free_port, free_ports
from tests.processes import alive

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("host")]


# -- commands


def test_a_command_runs_on_every_rank_with_its_output_here(host: Any, capfd: Any) -> None:
    script = "echo $MONARCH_RANK_x of $MONARCH_SIZE_x $WORD$HOME; echo oops >&2; exit $MONARCH_RANK_x"
    future = exec_command(host, ["sh", "-c", script], env={"WORD": "yes", "HOME": None}, per_host={"x": 3})
    assert future.get(SOON) == 2
    output = capfd.readouterr()
    assert sorted(output.out.splitlines()) == ["0 of 3 yes", "1 of 3 yes", "2 of 3 yes"]
    assert output.err.splitlines().count("oops") == 3


def test_a_command_may_run_elsewhere_and_write_to_files(host: Any, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    out = f"{tmp_path}/out/$SUBDIR"
    command = ["sh", "-c", "pwd; kill -9 $$"]
    assert exec_command(host, command, workdir=f"{tmp_path}/there", output_dir=out, per_host={"x": 2}).get(SOON) == 137
    assert (tmp_path / "out" / "x_1" / "stdout.txt").read_text() == f"{tmp_path}/there\n"


@pytest.mark.parametrize("cut", ["cancel", "death"])
def test_a_command_that_is_cut_leaves_no_process_and_no_thread(host: Any, tmp_path: Path, cut: str) -> None:
    future = exec_command(
        host, ["sh", "-c", f"echo $$ $PPID > {tmp_path}/draft; mv {tmp_path}/draft {tmp_path}/pids; exec sleep 1000"]
    )
    until(lambda: (tmp_path / "pids").exists(), "it runs")
    command, process = map(int, (tmp_path / "pids").read_text().split())
    if cut == "cancel":
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.get(SOON)
    else:
        os.kill(process, signal.SIGKILL)
        with pytest.raises(SupervisionError):
            future.get(SOON)
    until(lambda: not alive(command), "the command has ended")
    until(lambda: not any(t.name.startswith("monarch-exec") for t in threading.enumerate()), "its threads have ended")


def test_a_script_goes_on_after_the_death_of_a_commands_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from monarch.actor import this_host\nfrom monarch.job import exec_command\n"
        "error = exec_command(this_host(), ['sh', '-c', 'kill -9 $PPID; sleep 100']).exception(30)\n"
        "print(type(error).__name__, exec_command(this_host(), ['sh', '-c', 'exit 3']).get(30))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=SOON, check=False)
    assert (done.stdout, done.returncode) == ("SupervisionError 3\n", 0), done.stderr


def test_python_runs_in_the_programs_interpreter(host: Any, tmp_path: Path, capfd: Any) -> None:
    script = tmp_path / "tell.py"
    script.write_text("import sys; print(sys.executable, sys.argv[1:]); sys.exit(3)")
    assert exec_command(host, [script, "a b"]).get(SOON) == 3
    assert capfd.readouterr().out == f"{sys.executable} ['a b']\n"


def test_a_program_that_is_not_there_is_status_127(host: Any, capfd: Any) -> None:
    assert exec_command(host, ["/no/such/program"]).get(SOON) == 127
    assert "/no/such/program: No such file" in capfd.readouterr().err
    with pytest.raises(ValueError, match="as a list"):
        exec_command(host, "ls")
    with pytest.raises(ValueError, match="not both"):
        exec_command(host, ["ls"], rank=0, point={"hosts": 0})
    for words, env, message in ((["echo", 5], {}, "not int"), (["true"], {"A": 1}, "takes text, and 'A': 1 is not")):
        with pytest.raises(TypeError, match=message):
            exec_command(host, words, env=env)
    with pytest.raises(TypeError, match="takes text"):
        shell(host, env={"A": 1})


# -- shells

SHELL = """
import sys
from monarch_nb.actor import this_host
from monarch_nb.job import shell
sys.exit(shell(this_host(), env={"WORD": "gr\\u00fcn", "PS1": "> ", "SHELL": "/bin/sh"}, workdir="/"))
"""


def test_a_shell_forwards_input_and_output_and_gives_its_status() -> None:
    env = {**os.environ, "PYTHONPATH": ROOT}
    typed = "test -t 0 && tty >/dev/null && echo is a ter''minal; echo $WORD in $PWD; stty size; exit 5\n"
    done = subprocess.run(
        [sys.executable, "-c", SHELL], input=typed.encode(), capture_output=True, env=env, timeout=40, check=False
    )
    output = done.stdout.decode()
    assert done.returncode == 5, (output, done.stderr)
    for part in ("is a terminal\n", "\ngrün in /", "\n24 80"):
        assert part in output.replace("\r", "")


class OpenShell:
    """A shell with typed input; `output` is all that it printed."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.output = b""

    def type(self, text: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def expect(self, pattern: bytes) -> "re.Match[bytes]":
        assert self.process.stdout is not None
        while (match := re.search(pattern, self.output)) is None:
            self.output += os.read(self.process.stdout.fileno(), 4096)
        return match

    def end_of_input(self) -> int:
        """End its input; returns its status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(SOON)


@pytest.fixture
def open_shell() -> Iterator[OpenShell]:
    env = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", SHELL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        yield OpenShell(process)
        process.kill()  # else Popen waits for it


@pytest.mark.slow
def test_a_shell_ends_with_its_input_and_gets_ctrl_c(open_shell: OpenShell) -> None:
    # `sh` prints and then is `sleep`: between printing and forking, a shell would miss the signal.
    open_shell.type(b"sh -c \"echo be''gun; exec sleep 1000\"\n")
    open_shell.expect(b"begun")
    open_shell.type(b"\x03echo st''ill here\n")
    open_shell.expect(b"still here")
    assert open_shell.end_of_input() in (0, 130)


@pytest.mark.parametrize("stubborn", [b"", pytest.param(b"trap '' HUP TERM; ", marks=pytest.mark.slow)])
def test_the_end_of_its_input_ends_what_runs_in_a_shell(open_shell: OpenShell, stubborn: bytes) -> None:
    open_shell.type(b'sh -c "%becho pid=\\$\\$.; while :; do sleep 1000; done"\n' % stubborn)
    pid = int(open_shell.expect(rb"pid=(\d+)\.")[1])
    assert open_shell.end_of_input() in (129, 137)
    until(lambda: not alive(pid), "the end of what ran in the foreground")


def test_a_shell_is_for_one_host(host: Any) -> None:
    class Two:
        def __len__(self) -> int:
            return 2

    with pytest.raises(ValueError, match="not one of 2 hosts: slice it"):
        shell(Two())  # type: ignore[arg-type]


# -- forwarded ports


class Echo(socketserver.ThreadingTCPServer):
    """Echoes its input, then counts it at the end."""

    allow_reuse_address = True  # its threads are joined: an open connection hangs the test

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            count = 0
            with contextlib.suppress(ConnectionError):
                while data := self.request.recv(1 << 16):
                    count += len(data)
                    self.request.sendall(data)
                self.request.sendall(b"end %d" % count)


@pytest.fixture
def echo() -> Iterator[int]:
    with Echo(("127.0.0.1", 0), Echo.Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def forwarder() -> Iterator[Any]:
    actor: Any = this_proc().spawn("forwarder", PortForwarder)
    try:
        yield actor
    finally:
        actor.stop().get(SOON)


def exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=SOON) as connection:
        answer = bytearray()

        def listen() -> None:
            while part := connection.recv(1 << 16):
                answer.extend(part)

        thread = threading.Thread(target=listen)
        thread.start()
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        thread.join(SOON)
        return bytes(answer)


@pytest.mark.slow
def test_many_connections_go_both_ways_and_end_cleanly(host: Any, echo: int) -> None:
    ports = free_ports(2)
    with spawned(host, 2, "there") as remote, spawned(host, 2, "here") as local, forwarder() as forward:
        forward.forward.call(remote, echo, local, lambda point: f"127.0.0.1:{ports[point['gpus']]}").get(SOON)
        large = os.urandom(12 << 20)  # larger than the limit in flight
        assert exchange(ports[0], large) == large + b"end %d" % len(large)
        results: dict[int, bytes] = {}

        def connect(number: int) -> None:
            results[number] = exchange(ports[number % 2], b"%d" % number * 1000)

        threads = [threading.Thread(target=connect, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert results == {
            number: b"%d" % number * 1000 + b"end %d" % len(b"%d" % number * 1000) for number in range(20)
        }


def test_stopping_the_forwarder_closes_what_it_forwarded(host: Any, echo: int) -> None:
    port = free_port()
    with spawned(host, 1) as procs:
        with forwarder() as forward:
            forward.forward.call(procs, echo, procs, f"127.0.0.1:{port}").get(SOON)
            connection = socket.create_connection(("127.0.0.1", port), timeout=SOON)
            connection.sendall(b"still there")
            assert connection.recv(100) == b"still there"
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
        connection.close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=SOON)


def test_a_connection_nobody_accepts_is_cut_and_others_go_on(host: Any, echo: int) -> None:
    closed, port, open_port = free_ports(3)
    with spawned(host, 1) as procs, forwarder() as forward:
        forward.forward.call(procs, closed, procs, f"127.0.0.1:{port}").get(SOON)
        forward.forward.call(procs, echo, procs, f"127.0.0.1:{open_port}").get(SOON)
        address = ("127.0.0.1", port)
        with socket.create_connection(address, timeout=SOON) as connection, contextlib.suppress(ConnectionResetError):
            assert connection.recv(10) == b""
        assert exchange(open_port, b"x") == b"xend 1"


def test_ranks_of_one_machine_may_share_an_address_that_is_free(host: Any, echo: int) -> None:
    port = free_port()
    with spawned(host, 2) as procs, forwarder() as forward:
        forward.forward.call(procs, echo, procs, f"127.0.0.1:{port}").get(SOON)
        assert [exchange(port, b"x" * size) for size in range(8)] == [b"x" * n + b"end %d" % n for n in range(8)]
        with pytest.raises(ActorError, match="already in use"):
            forward.forward.call(procs, echo, procs, f"127.0.0.1:{port}").get(SOON)
        assert exchange(port, b"x") == b"xend 1"


def test_a_forward_that_fails_on_one_rank_leaves_none_listening(host: Any, echo: int) -> None:
    ports = free_ports(2)
    with spawned(host, 2) as procs, forwarder() as forward, socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[1]))
        listener.listen()
        with pytest.raises(ActorError, match="already in use"):
            forward.forward.call(procs, echo, procs, lambda point: f"127.0.0.1:{ports[point['gpus']]}").get(SOON)
        with pytest.raises(ActorError, match="from 1 to 65535"):
            forward.forward.call(procs, lambda point: 80 * point["gpus"], procs, "127.0.0.1:8080").get(SOON)
        with socket.socket() as free:
            free.bind(("127.0.0.1", ports[0]))
        spare = free_port()
        forward.forward.call(procs, echo, procs, f"127.0.0.1:{spare}").get(SOON)  # it lives
        assert exchange(spare, b"x") == b"xend 1"


def test_ports_that_cannot_be_forwarded_are_refused(host: Any) -> None:
    with spawned(host, 1) as single, spawned(host, 2) as pair, forwarder() as forward:
        for arguments, pattern in (
            ((single, 80, pair, "127.0.0.1:8080"), "the same shape"),
            ((single, 0, single, "127.0.0.1:8080"), "from 1 to 65535"),
            ((single, 80, single, "8080"), "127.0.0.1:8080"),
            ((single, lambda point: "80", single, "127.0.0.1:8080"), "from 1 to 65535"),
        ):
            with pytest.raises((ActorError, RuntimeError), match=pattern):
                forward.forward.call(*arguments).get(SOON)

"""The command line of a wheel's user: `monarch-nb` and `python -m monarch_nb`."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from monarch_nb import __version__
from monarch_nb.cli import main
from monarch_nb.doctor import Check
from monarch_nb.host import folders
from monarch_nb.transport import Keys
from monarch_nb.transport.tcp.endpoints import knock
from tests.polling import until
from tests.ports import free_port

pytestmark = pytest.mark.timeout(120)


def cli(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "monarch_nb", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def findings(done: "subprocess.CompletedProcess[str]") -> dict[str, list[Check]]:
    return msgspec.json.decode(done.stdout, type=dict[str, list[Check]])


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[str]:
    address = f"tcp://127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "monarch_nb", "agent", "--tcp", address, "--key", str(tmp_path / "job.key"), "--keep"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert b"host" in process.stdout.readline()
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        process.stdout.close()


@pytest.mark.parametrize("command", [("mesh", "ls"), ("job", "ls"), ("top", "--list")])
def test_a_command_without_a_reader_ends_without_a_traceback(command: tuple[str, ...], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for close in ({"stdout": writing}, {"preexec_fn": lambda: os.close(1)}):
        done = subprocess.run(
            [sys.executable, "-m", "monarch_nb", *command], stderr=subprocess.PIPE, text=True, check=False,
            cwd=tmp_path, env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}, **close,  # type: ignore[call-overload]
        )  # fmt: skip
        assert (done.stderr, done.returncode) == ("", int("stdout" in close))
    os.close(writing)


def test_an_agent_without_standard_streams_runs(tmp_path: Path) -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "monarch_nb", "agent", "--tcp", f"tcp://127.0.0.1:{port}", "--insecure-loopback",
         "--keep"],
        preexec_fn=lambda: os.closerange(0, 3),
    )  # fmt: skip
    try:
        until(lambda: knock(f"tcp://127.0.0.1:{port}", 1.0) or process.poll() is not None)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def test_a_second_agent_at_a_port_says_that_the_host_runs(agent: str, tmp_path: Path) -> None:
    second = cli("agent", "--tcp", agent, "--key", str(tmp_path / "job.key"), "--keep")
    assert (second.returncode, second.stderr.count("\n")) == (1, 1)
    assert "has an agent already. End it first" in second.stderr


def test_the_version_and_the_commands_are_told() -> None:
    assert cli("--version").stdout == f"monarch-nb {__version__}\n"
    usage = cli("--help")
    assert usage.returncode == 0
    assert [word for word in ("agent", "doctor", "%load_ext monarch") if word not in usage.stdout] == []
    assert "usage: monarch-nb agent" in cli("agent", "--help").stdout


def test_without_a_command_the_usage_is_an_error() -> None:
    done = cli()
    assert done.returncode == 2
    assert "doctor" in done.stderr


@pytest.mark.slow
def test_the_doctor_finds_this_machine_and_its_kernel_well() -> None:
    done = cli("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {finding.about: finding for group in findings(done).values() for finding in group}
    assert {"Python", "versions", "open files", "shared memory", "ports", "a process", "kernel", "comm"} <= rows.keys()
    assert [finding for finding in rows.values() if finding.level == "error"] == []
    assert "load_ext" in rows["kernel"].found


@pytest.mark.slow
def test_the_doctor_looks_at_attached_hosts_with_their_key(agent: str, tmp_path: Path) -> None:
    done = cli("doctor", agent, "--key", str(tmp_path / "job.key"), "--json", "--no-kernel")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {finding.about: finding for finding in findings(done)[agent]}
    assert {"name", "port", "agent", "key", "a process", "Python", "versions", "open files"} <= rows.keys()
    assert [finding for finding in rows.values() if finding.level == "error"] == []


@pytest.mark.slow
def test_doctor_fails_on_an_unreachable_host_or_a_readable_key(tmp_path: Path) -> None:
    key = tmp_path / "job.key"
    key.write_text("secret")
    key.chmod(0o644)
    address = f"tcp://127.0.0.1:{free_port()}"
    unreadable = cli("doctor", address, "--key", str(key), "--no-kernel")
    assert unreadable.returncode == 1
    assert "chmod 600" in unreadable.stdout
    assert "✗ key" in unreadable.stdout
    Keys.load_or_create(tmp_path / "new.key")
    silent = cli("doctor", address, "--key", str(tmp_path / "new.key"), "--no-kernel", "--timeout", "0.5")
    assert silent.returncode == 1
    assert f"nobody listens at {address}" in silent.stdout
    assert "✗ port" in silent.stdout
    assert "start an agent on it" in silent.stdout
    missing = cli("doctor", address, "--key", str(tmp_path / "none.key"), "--no-kernel")
    assert missing.returncode == 1
    assert "there is no key file" in missing.stdout
    assert "Traceback" not in unreadable.stderr + silent.stderr


@pytest.mark.slow
def test_doctor_fails_on_a_low_limit_and_says_what_to_do() -> None:
    command = f"ulimit -Sn 200; ulimit -Hn 200; exec {sys.executable} -m monarch_nb doctor --no-kernel"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "limits.conf" in done.stdout


def test_agents_at_terminals_say_how_to_attach_and_end_on_interrupt(tmp_path: Path) -> None:
    address, key = f"tcp://127.0.0.1:{free_port()}", tmp_path / "job.key"
    terminal, its_end = os.openpty()
    command = [sys.executable, "-m", "monarch_nb", "agent", "--tcp", address, "--key", str(key), "--keep"]
    agent = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=subprocess.PIPE)
    os.close(its_end)
    try:
        output = ""
        while "Ctrl-C" not in output:
            output += os.read(terminal, 4096).decode()
        assert f'attach_hosts(["{address}"], key="{key}")' in output.replace("\r\n", "\n")
        assert "{" not in output
        agent.send_signal(signal.SIGINT)
        assert agent.wait(20) == 0
    finally:
        agent.kill()
        agent.wait()
        os.close(terminal)
        assert agent.stderr is not None
        agent.stderr.close()


@pytest.mark.parametrize("words", [["job", "list"], ["job"], ["mesh", "list"], ["mesh"]])
def test_lists_of_nothing_say_what_to_do(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folders, "_bases", lambda: [tmp_path])  # other tests have jobs in the usual folders
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "no job runs, and there is no monarch.toml" in output or "no mesh was left: mesh.detach()" in output

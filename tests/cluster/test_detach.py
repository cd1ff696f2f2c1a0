"""Meshes that outlive their controllers, with real processes: detached, killed, attached, taken over, expired."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_nb.connect import detached_meshes
from monarch_nb.host import folders
from monarch_nb.host.preemption import END
from monarch_nb.transport import Keys
from tests.cluster.detach_tools import ROOT, SOON, Controller, come_back, files
from tests.polling import until
from tests.ports import free_port
from tests.processes import alive

pytestmark = pytest.mark.timeout(120)


def name_of(host: str) -> str:
    """A pattern of a host's displayed name: its machine, with a number if that has several hosts."""
    return rf"{re.escape(host.rpartition('.')[0])}(·\d+)?"


def sweep() -> list[Path]:
    """Removes the run folders of killed agents; returns those that remain."""
    runs = Path(os.environ["XDG_RUNTIME_DIR"])
    folders.sweep(runs)
    return list(runs.iterdir())


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files of meshes and run folders of one test; nothing is left in them at its end."""
    runs = Path(f"/tmp/md{os.getpid()}-{time.monotonic_ns() % 10**6}")
    runs.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runs))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield tmp_path
    until(lambda: not list(runs.iterdir()))
    runs.rmdir()


def test_a_detached_mesh_is_attached_by_another_program_with_its_state(place: Path) -> None:
    first = Controller(place, "leave").done()
    pids = first.said("pids")[0]
    assert first.said("counts") == [["15", "15"]]
    assert all("left: detached for 1m" in " ".join(error) for error in first.said("error")), first.lines
    assert len(first.said("error")) == 2
    [file] = files(place)
    assert file.stat().st_mode & 0o777 == 0o600
    (place / "gate").touch()
    os.kill(parent(int(pids[0])), signal.SIGTERM)  # the notice comes while no controller is attached
    second = Controller(place, "take").done()
    notices = [line for line in second.lines if "notice came: Host " in line]
    assert len(notices) == 1, second.lines
    assert notices[0].endswith("is about to be taken away (SIGTERM), soon; nobody knows when, gpus=0-1")
    assert second.said("pids") == [pids]
    assert second.said("counts") == [["16", "16"]]
    assert second.said("slice") == [["17"]]
    text = 'counter.wait_for() ended on gpus=0-1, with no controller to receive it; monarch.results("counter") has it'
    assert any(text in line for line in second.lines), second.lines
    assert second.said("result") == [["wait_for", "0", "1", str(place / "gate"), str(place / "gate")]]
    assert not any(map(alive, map(int, pids)))
    assert files(place) == []


@pytest.mark.slow
def test_a_record_that_is_written_meanwhile_does_not_shorten_the_lease(place: Path) -> None:
    first = Controller(place, "leave_while_recording").done()
    second = Controller(place, "take").done()
    assert second.said("pids") == first.said("pids"), second.lines


def test_only_with_mesh_keep_a_killed_controller_leaves_its_mesh(place: Path) -> None:
    for keep in ("0s", "60s"):
        first = Controller(place, "hold", MONARCH_NB_MESH_KEEP=keep)
        pids = [int(pid) for pid in first.until("pids")]
        first.until("holds")
        if keep != "0s":
            until(lambda: bool(files(place)))
        first.kill()
        if keep == "0s":
            until(lambda pids=pids: not any(map(alive, pids)))  # type: ignore[misc]
    second = Controller(place, "take").done()
    assert [[str(pid) for pid in pids]] == second.said("pids")
    assert second.said("counts") == [["16", "16"]]


@pytest.mark.slow
def test_an_expired_lease_ends_the_mesh_and_late_attaches_say_so(place: Path) -> None:
    (place / "gate").touch()
    first = Controller(place, "leave", "1s").done()
    until(lambda: not any(alive(int(pid)) for pid in first.said("pids")[0]))
    second = Controller(place, "take").done()
    assert "trainers is gone: nobody came back to it: its lease of 1s ended at" in " ".join(second.said("refused")[0])
    third = Controller(place, "take").done()
    assert "there is no mesh 'trainers' to attach; there are: none" in " ".join(third.said("refused")[0])


def shell(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "monarch_nb", "mesh", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.slow
def test_another_version_is_refused_but_the_shell_can_stop_its_meshes(place: Path) -> None:
    (place / "gate").touch()
    first = Controller(place, "leave").done()
    pids = [int(pid) for pid in first.said("pids")[0]]
    assert "trainers {gpus=2} with counter on " in shell("ls").stdout
    [file] = files(place)
    file.write_bytes(msgspec.json.encode({**msgspec.json.decode(file.read_bytes()), "version": "0.0.9"}))
    refusal = " ".join(Controller(place, "take").done().said("refused")[0])
    assert "trainers runs monarch-nb 0.0.9 on Python" in refusal
    assert "monarch-nb mesh stop trainers" in refusal
    assert shell("stop", "trainers").stdout == "stopped trainers: 2 procs\n"
    assert not any(map(alive, pids))
    second = shell("stop", "trainers")
    assert second.returncode == 1
    assert second.stderr.startswith(
        "there is no mesh 'trainers' to attach; there are: none. A mesh ends with its kernel"
    )


@pytest.mark.slow
def test_a_process_that_dies_meanwhile_is_told_of_and_healed_afterwards(place: Path) -> None:
    (place / "gate").touch()
    first = Controller(place, "leave").done()
    os.kill(int(first.said("pids")[0][1]), signal.SIGKILL)
    until(lambda: not alive(int(first.said("pids")[0][1])))
    second = Controller(place, "mend").done()
    assert any("trainers gpus=1 ended: Killed(sig=9)" in line for line in second.lines), second.lines
    assert second.said("error")
    assert second.said("counts") == [["16", "11"]]


@pytest.mark.slow
def test_a_controller_killed_in_mid_heal_leaves_a_consistent_mesh(place: Path) -> None:
    first = Controller(place, "fall", MONARCH_NB_MESH_KEEP="60s")
    first.until("heals")
    first.process.wait(SOON)
    first.kill()
    second = Controller(place, "pick_up").done()
    assert second.said("counts") == [["16", "11"]], second.lines
    [error] = second.said("error")
    assert int(error[0]) <= 2, "a call does not wait for an actor that nobody creates"
    assert "mesh late, gpus=1" in " ".join(error)
    assert any("late gpus=1 failed: the controller that was to create it ended" in line for line in second.lines)
    assert second.said("late") == [["101", "101"]]
    assert second.said("kept") == [["16", "11"], ["16", "10"]], "a reference follows heals of the new owner, too"


@pytest.mark.slow
def test_a_second_controller_is_refused_or_takes_over_with_notice(place: Path) -> None:
    (place / "gate").touch()
    Controller(place, "leave").done()
    first = Controller(place, "take", "hold")
    first.until("holds")
    refusal = " ".join(Controller(place, "take").done().said("refused")[0])
    assert f"held by the program detach_programs.py (process {first.process.pid} on" in refusal
    thief = Controller(place, "take", "steal").done()
    assert thief.said("counts") == [["17", "18"]]
    first.process.send_signal(signal.SIGUSR1)
    first.done()
    assert f"(process {thief.process.pid} on" in " ".join(first.said("error")[0])


@pytest.mark.slow
def test_calls_before_a_takeover_are_answered_to_the_new_owner(place: Path) -> None:
    first = Controller(place, "hold_busy", MONARCH_NB_MESH_KEEP="60s")
    first.until("holds")
    thief = Controller(place, "rob").done()
    assert thief.said("result") == [[str(place / "gate")] * 2], thief.lines
    first.done()
    assert f"taken over by the program detach_programs.py (process {thief.process.pid} on" in first.lines[-1]


@pytest.mark.slow
def test_references_of_other_meshes_work_while_a_mesh_is_left(place: Path) -> None:
    first = Controller(place, "leave_pair").done()
    assert first.said("alone") == [["15", "15"]]
    assert first.said("again") == [["15", "15"]]
    second = Controller(place, "take_pair").done()
    assert second.said("asked") == [["15", "10"]]  # a new counter


@pytest.mark.slow
def test_the_same_program_comes_back_and_its_handles_work_again(place: Path) -> None:
    program = Controller(place, "again").done()
    assert program.said("error") == [["True"]] * 4, "a mesh that was left may be another program's by now"
    assert program.said("counts") == [["15", "15"], ["16", "16"], ["11", "11"]]
    assert program.said("same") == [["True"]]
    assert "stopped" not in " ".join(program.said("view")[0]), program.lines


@pytest.fixture
def agents(place: Path) -> Iterator[tuple[Path, Callable[..., list[Any]]]]:
    """The key of host agents, and a function that starts two and returns their descriptions."""
    key = place / "job.key"
    Keys.load_or_create(key)
    started = []

    def start(*options: str, count: int = 2) -> list[Any]:
        line = [sys.executable, "-m", "monarch_nb", "agent", "--key", str(key), "--keep", *options]
        hosts = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(count)]
        started.extend(hosts)
        return [msgspec.json.decode(agent.stdout.readline()) for agent in hosts if agent.stdout is not None]

    yield key, start
    for agent in started:
        assert agent.stdout is not None
        agent.stdout.close()
        agent.send_signal(END)
        agent.wait(SOON)


@pytest.mark.slow
def test_meshes_on_joined_hosts_are_attached_over_tcp_by_key(
    place: Path, agents: tuple[Path, Callable[..., list[Any]]]
) -> None:
    key, start = agents
    endpoints = [agent["endpoint"] for agent in start("--tcp", "tcp://127.0.0.1:0")]
    second = come_back(place, Controller(place, "leave_busy", str(key), *endpoints).done())
    failed, waited = second.said("result")  # the answers of casts, which agents gather
    assert waited == ["wait_for", "0", "1", str(place / "gate"), str(place / "gate")]
    assert failed[:3] == ["fail_at", "0", "1"]
    assert "failed on 1 of 2 ranks: hosts=1" in " ".join(failed), failed
    text = "counter.fail_at() raised ValueError: not this one on hosts=1, with no controller to receive it"
    assert any(text in line for line in second.lines), second.lines


@pytest.mark.slow
def test_a_killed_controller_holds_no_mesh_before_its_hosts_notice(
    place: Path, agents: tuple[Path, Callable[..., list[Any]]]
) -> None:
    key, start = agents
    endpoints = [agent["endpoint"] for agent in start("--tcp", "tcp://127.0.0.1:0")]
    first = Controller(place, "hold", str(key), *endpoints, MONARCH_NB_MESH_KEEP="60s")
    first.until("holds")
    assert [mesh.holder is None for mesh in detached_meshes()] == [False]
    first.kill()
    [mesh] = detached_meshes()
    assert (mesh.holder, mesh.why) == (None, f"the program detach_programs.py (process {first.process.pid}) has ended")
    come_back(place, first)  # it needs no steal=True, for the 60 s of a lease
    sweep()  # the run folder of the killed controller


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_answers_that_a_killed_controller_had_not_read_are_kept(
    place: Path, agents: tuple[Path, Callable[..., list[Any]]], frozen: bool
) -> None:
    key, start = agents
    endpoints = [agent["endpoint"] for agent in start("--tcp", "tcp://127.0.0.1:0")]
    first = Controller(place, "hold_unread", str(key), *endpoints, MONARCH_NB_MESH_KEEP="60s")
    assert first.until("holds") == ["True", "1", "of", "2"]
    if frozen:  # the last answer is on its way, and never received
        first.process.send_signal(signal.SIGSTOP)
        (place / "gate").touch()
        until((place / "gate.answered").exists)
    first.kill()
    (place / "gate").touch()
    until((place / "gate.answered").exists)
    second = Controller(place, "take").done()
    gate = str(place / "gate")
    assert second.said("result") == [["add", "0", "1", "15", "15"], ["last_waits", "0", "1", gate, gate]], second.lines
    sweep()


@pytest.mark.slow
def test_a_name_that_now_resolves_to_another_host_is_reported(
    place: Path, agents: tuple[Path, Callable[..., list[Any]]]
) -> None:
    key, start = agents
    first, second, third = (agent["endpoint"] for agent in start("--tcp", "tcp://127.0.0.1:0", count=3))
    Controller(place, "leave_hosts", str(key), first, second).done()
    [file] = files(place)
    record = file.read_text()
    file.write_text(record.replace(first, third).replace(second, third))
    [refusal] = Controller(place, "take").done().said("refused")
    assert f"answers at {third}, not" in " ".join(refusal)
    file.write_text(record)
    assert Controller(place, "take").done().said("refused") == []


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_meshes_that_lost_a_host_can_be_detached_and_attached_repeatedly(place: Path, lost: int) -> None:
    first = Controller(place, "leave_local", str(lost)).done()
    [[host]] = first.said("host")
    for _ in range(2):
        second = Controller(place, "look").done()
        assert second.said("lives") == [[str(1 - lost)]], second.lines
        assert int(second.said("attached")[0][0]) <= 5
        pattern = f"trainers hosts={lost} counts as lost: its host {name_of(host)} cannot be reached"
        assert any(re.search(pattern, line) for line in second.lines), second.lines
    assert shell("stop", "trainers").stdout.startswith("stopped trainers: 1 proc\n")
    assert files(place) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dials", "is behind a gateway", "is the gateway"])
def test_an_unreachable_host_is_named_however_it_was_reached(
    place: Path, agents: tuple[Path, Callable[..., list[Any]]], how: str
) -> None:
    key, start = agents
    if how == "dials":
        address = f"tcp://127.0.0.1:{free_port()}"
        hosts = start("--dial", address)
        first = Controller(place, "leave_callers", str(key), address).done()
    else:
        hosts = start("--tcp", "tcp://127.0.0.1:0")
        endpoints = [agent["endpoint"] for agent in hosts]
        first = Controller(place, "leave_behind", str(key), endpoints[0], *endpoints).done()
    rank = {"dials": 1, "is behind a gateway": 1, "is the gateway": 0}[how]
    pid = int(first.said("pids")[0][rank])
    [victim] = [agent for agent in hosts if agent["pid"] == parent(pid)]
    os.kill(victim["pid"], signal.SIGKILL)
    until(lambda: not alive(pid))
    second = Controller(place, "look").done()
    until(lambda: victim["host"] not in str(sweep()))
    if how == "is the gateway":  # nothing else leads to the other host
        assert "cannot be attached" in " ".join(second.said("refused")[0]), second.lines
        return
    assert second.said("lives") == [["0"]], second.lines
    pattern = f"its host {name_of(victim['host'])} cannot be reached"
    assert any(re.search(pattern, line) for line in second.lines), second.lines


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_attaching_without_an_unreachable_host_works_and_heals_later(
    place: Path, agents: tuple[Path, Callable[..., list[Any]]], index: int
) -> None:
    key, start = agents
    hosts = start("--tcp", "tcp://127.0.0.1:0")
    first = Controller(place, "leave_hosts", str(key), *(agent["endpoint"] for agent in hosts)).done()
    pids = [int(pid) for pid in first.said("pids")[0]]
    os.kill(hosts[index]["pid"], signal.SIGSTOP)
    second = Controller(place, "wait_and_mend")
    second.until("waits")
    assert second.said("lost") == [[str(index)]], second.lines
    assert int(second.said("attached")[0][0]) <= 20
    pattern = f"trainers hosts={index} counts as lost: its host {name_of(hosts[index]['host'])} cannot be reached"
    assert any(re.search(pattern, line) for line in second.lines), second.lines
    assert re.search(name_of(hosts[index]["host"]), " ".join(second.said("error")[0]))
    assert alive(pids[index])
    os.kill(hosts[index]["pid"], signal.SIGCONT)
    second.process.send_signal(signal.SIGUSR1)
    second.done()
    counts = ["16", "16"]
    counts[index] = "11"
    assert second.said("counts") == [counts]
    assert second.said("across") == [counts[::-1]]
    assert not alive(pids[index]), "what was given up is stopped"
    third = Controller(place, "take").done()
    assert sorted(third.said("counts")[0]) == ["12", "17"], third.lines


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_attaching_to_a_restarted_agent_works_and_its_ranks_are_healed(
    place: Path, agents: tuple[Path, Callable[..., list[Any]]], index: int
) -> None:
    key, start = agents
    hosts = [start("--tcp", f"tcp://127.0.0.1:{free_port()}", count=1)[0] for _ in range(2)]
    first = Controller(place, "leave_hosts", str(key), *(agent["endpoint"] for agent in hosts)).done()
    os.kill(hosts[index]["pid"], signal.SIGKILL)
    until(lambda: not alive(int(first.said("pids")[0][index])))
    start("--tcp", hosts[index]["endpoint"], "--host", hosts[index]["host"], count=1)
    second = Controller(place, "mend", str(index)).done()
    assert second.said("error"), second.lines
    assert any(f"trainers hosts={index} ended: its host's agent was started anew" in line for line in second.lines)
    counts = ["16", "16"]
    counts[index] = "11"
    assert second.said("counts") == [counts]


@pytest.mark.slow
def test_ranks_healed_on_a_new_agent_outlive_a_controller_killed_then(
    place: Path, agents: tuple[Path, Callable[..., list[Any]]]
) -> None:
    key, start = agents
    hosts = [start("--tcp", f"tcp://127.0.0.1:{free_port()}", count=1)[0] for _ in range(2)]
    endpoints = [agent["endpoint"] for agent in hosts]
    first = Controller(place, "fall_on_hosts", str(key), *endpoints, MONARCH_NB_MESH_KEEP="60s")
    before = first.until("pids")
    first.until("holds")
    os.kill(hosts[1]["pid"], signal.SIGKILL)
    until(lambda: not alive(int(before[1])))
    start("--tcp", hosts[1]["endpoint"], "--host", hosts[1]["host"], count=1)
    first.process.send_signal(signal.SIGUSR1)
    assert first.process.wait(SOON) == -signal.SIGKILL
    first.kill()
    second = Controller(place, "look").done()
    assert second.said("lives") == [["0", "1"]], second.lines
    sweep()


def test_a_rank_calls_others_after_a_heal_that_nobody_recorded(place: Path) -> None:
    first = Controller(place, "fall_unrecorded", MONARCH_NB_MESH_KEEP="60s")
    assert first.until("across") == ["15"]
    assert first.process.wait(SOON) == -signal.SIGKILL
    first.kill()
    second = Controller(place, "mend_unrecorded").done()
    assert second.said("across") == [["15"]], second.lines
    assert second.said("incarnation") == [["2"]], second.lines


@pytest.mark.slow
def test_a_mesh_behind_a_gateway_is_attached_through_the_gateway(
    place: Path, agents: tuple[Path, Callable[..., list[Any]]]
) -> None:
    key, start = agents
    endpoints = [agent["endpoint"] for agent in start("--tcp", "tcp://127.0.0.1:0")]
    come_back(place, Controller(place, "leave_behind", str(key), endpoints[0], *endpoints).done())


@pytest.mark.slow
def test_a_mesh_of_hosts_that_dial_is_attached_where_they_dial(
    place: Path, agents: tuple[Path, Callable[..., list[Any]]]
) -> None:
    key, start = agents
    address = f"tcp://127.0.0.1:{free_port()}"
    start("--dial", address)
    come_back(place, Controller(place, "leave_callers", str(key), address).done())


@pytest.mark.slow
def test_a_controller_that_slept_past_its_lease_learns_so_and_heals(
    place: Path, agents: tuple[Path, Callable[..., list[Any]]]
) -> None:
    key, start = agents
    endpoints = [agent["endpoint"] for agent in start("--tcp", "tcp://127.0.0.1:0")]
    laptop = Controller(place, "nap", str(key), *endpoints)
    pids = [int(pid) for pid in laptop.until("pids")]
    laptop.until("sleeps")
    laptop.process.send_signal(signal.SIGSTOP)
    for _ in range(2):  # its connections count as cut only when libzmq has heard nothing for 20 s
        with contextlib.suppress(AssertionError):
            until(lambda: not any(map(alive, pids)))
    assert not any(map(alive, pids)), "the hosts do not wait for ever"
    laptop.process.send_signal(signal.SIGCONT)
    laptop.process.send_signal(signal.SIGUSR1)
    laptop.done()
    [error] = laptop.said("error")
    assert "silent for longer than its lease" in " ".join(error), laptop.lines
    assert "heal_mesh(" in " ".join(error)
    assert laptop.said("counts") == [["15", "15"], ["11", "11"]]

"""Real engines for jobs, started for a test: tests of what is not installed are skipped with a message."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.polling import until
from tests.ports import free_port, free_ports
from tests.processes import alive


def needs(*programs: str, package: str) -> None:
    """Skips the test where a program is missing."""
    for program in programs:
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            pytest.skip(f"NOT TESTED HERE: there is no {program}; apt-get install {package}", allow_module_level=True)


def program(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert path is not None
    return path


def with_us(line: list[str]) -> list[str]:
    """A command that ends when this process is killed, so that an aborted test leaves no daemons."""
    return ["setpriv", "--pdeathsig", "KILL", *line] if shutil.which("setpriv") else line


class SSHServer:
    """OpenSSH's own server, for this user, who logs in with a key."""

    def __init__(self, folder: Path, address: str = "127.0.0.1", netns: str = "", **settings: str) -> None:
        self.folder = folder
        self.address = address
        self.port = free_port()
        self.identity = folder / "identity"
        self.known_hosts = folder / "known_hosts"
        host_key = folder / "host_key"
        for file in (self.identity, host_key):
            if not file.exists():
                subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)
        shutil.copy(f"{self.identity}.pub", folder / "authorized_keys")
        public = Path(f"{host_key}.pub").read_text().split()[:2]
        with open(self.known_hosts, "a") as hosts_file:
            hosts_file.write(f"[{address}]:{self.port} {' '.join(public)}\n")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        lines = {
            "Port": str(self.port), "ListenAddress": address, "HostKey": str(host_key), "UsePAM": "no",
            "AuthorizedKeysFile": str(folder / "authorized_keys"), "StrictModes": "no", "PidFile": "none",
            "PasswordAuthentication": "no", "PermitRootLogin": "prohibit-password",
            "SetEnv": f"XDG_STATE_HOME={folder / 'there'} MONARCH_NB_PRELOAD=", **settings,
        }  # fmt: skip
        config = folder / f"sshd_config_{self.port}"
        config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        self.log = folder / f"sshd_{self.port}.log"
        prefix = ["ip", "netns", "exec", netns] if netns else []
        self._line = with_us([*prefix, program("sshd"), "-D", "-f", str(config), "-E", str(self.log)])
        self.start()

    @property
    def name(self) -> str:
        """The machine's name in a job."""
        return f"{self.address}:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(self._line, stdin=subprocess.DEVNULL)
        until(lambda: self.log.exists() and "listening on" in self.log.read_text(), "sshd listens")

    def cut(self) -> None:
        """Ends the server and all its connections, as a broken network would, but nothing that they have started."""
        children = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False)
        grandchildren = [
            pid
            for child in children.stdout.split()
            for pid in subprocess.run(
                ["pgrep", "-P", child], capture_output=True, text=True, check=False
            ).stdout.split()
        ]
        self.process.kill()
        self.process.wait()
        for pid in (*children.stdout.split(), *grandchildren):
            if "sshd" in command_of(int(pid)):
                os.kill(int(pid), 9)
        self.log.unlink()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


PYTHON = sys.executable


def none_alive(pids: list[int], seconds: float = 10.0) -> bool:
    """Whether all processes end within `seconds`."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


class SlurmCluster:
    """Four virtual nodes on this machine, with a munge of their own: no systemd, nothing outside the folder.

    As with cgroups, which need root of the machine, signals go to the tasks, not to their children.
    """

    def __init__(self, folder: Path, kill_wait: int = 2) -> None:
        """Jobs have `kill_wait` seconds of grace. `urgent` preempts jobs of `all`; `closed` starts none."""
        self.folder = folder
        for name in ("state", "log", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        socket = folder / "munge.socket"
        controller, *nodes = free_ports(5)
        name = os.uname().nodename.partition(".")[0]
        settings = {
            "ClusterName": "test", "SlurmctldHost": f"{name}(127.0.0.1)", "SlurmUser": "root", "SlurmdUser": "root",
            "AuthType": "auth/munge", "AuthInfo": f"socket={socket}", "CredType": "cred/munge",
            "StateSaveLocation": folder / "state", "SlurmdSpoolDir": folder / "spool" / "%n",
            "SlurmctldPidFile": folder / "ctld.pid", "SlurmdPidFile": folder / "slurmd-%n.pid",
            "SlurmctldLogFile": folder / "log" / "ctld.log", "SlurmdLogFile": folder / "log" / "%n.log",
            "SlurmctldPort": controller, "ProctrackType": "proctrack/pgid", "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none", "AccountingStorageType": "accounting_storage/none",
            "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_Core", "ReturnToService": 2,
            "SchedulerParameters": "sched_interval=2,bf_interval=2,defer", "MpiDefault": "none",
            "SwitchType": "switch/none", "KillWait": kill_wait,
            "PreemptType": "preempt/partition_prio", "PreemptMode": "CANCEL", "MinJobAge": 60, "InactiveLimit": 0,
        }  # fmt: skip
        lines = [f"{setting}={value}" for setting, value in settings.items()]
        lines += [
            f"NodeName=n{number} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000"
            for number, port in enumerate(nodes, 1)
        ]
        lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1")
        lines.append("PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF")
        lines.append("PartitionName=closed Nodes=ALL MaxTime=INFINITE State=DOWN PriorityTier=1")
        self.conf = folder / "slurm.conf"
        self.conf.write_text("\n".join(lines) + "\n")
        self.env = {**os.environ, "SLURM_CONF": str(self.conf)}
        self._servers: list[subprocess.Popen[bytes]] = []
        files = [f"--{kind}-file={folder / f'munge.{kind}'}" for kind in ("pid", "log", "seed")]
        self._serve("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}", *files)
        until(socket.exists, "munged listens")
        self._serve("slurmctld", "-D", "-i")
        for number in range(1, 5):
            self._serve("slurmd", "-D", "-N", f"n{number}")
        until(lambda: self.ask("sinfo", "-h", "-o", "%t %D") == "idle 4", "all nodes are idle")

    def _serve(self, name: str, *words: str) -> None:
        with open(self.folder / "log" / f"{name}.out", "ab") as log:
            line = with_us([program(name), *words])
            self._servers.append(subprocess.Popen(line, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def ask(self, *line: str) -> str:
        done = subprocess.run(line, env=self.env, capture_output=True, text=True, check=False)
        return (done.stdout or done.stderr).strip()

    def answers(self, does: bool) -> None:
        """Stops the controller, or lets it go on."""
        self._servers[1].send_signal(signal.SIGCONT if does else signal.SIGSTOP)

    def close(self) -> None:
        self.answers(True)
        self.ask("scancel", "--user=root")
        for server in reversed(self._servers):
            server.terminate()
        for server in self._servers:
            try:
                server.wait(1)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

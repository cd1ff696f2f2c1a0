"""Real engines for jobs, started for a test: what is not installed is skipped, and said aloud."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.fault_tools import until
from tests.ports import free_port
from tests.processes import alive


def needs(*programs: str, package: str) -> None:
    """Skips the test where a program is missing."""
    for program in programs:
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            pytest.skip(f"NOT TESTED HERE: there is no {program}; apt-get install {package}", allow_module_level=True)


def program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert found is not None
    return found


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
        with open(self.known_hosts, "a") as known:
            known.write(f"[{address}]:{self.port} {' '.join(public)}\n")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        lines = {
            "Port": str(self.port), "ListenAddress": address, "HostKey": str(host_key), "UsePAM": "no",
            "AuthorizedKeysFile": str(folder / "authorized_keys"), "StrictModes": "no", "PidFile": "none",
            "PasswordAuthentication": "no", "PermitRootLogin": "prohibit-password",
            "SetEnv": f"XDG_STATE_HOME={folder / 'there'}", **settings,
        }  # fmt: skip
        config = folder / f"sshd_config_{self.port}"
        config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        self.log = folder / f"sshd_{self.port}.log"
        inside = ["ip", "netns", "exec", netns] if netns else []
        self._line = [*inside, program("sshd"), "-D", "-f", str(config), "-E", str(self.log)]
        self.start()

    @property
    def name(self) -> str:
        """As a job names the machine."""
        return f"{self.address}:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(self._line, stdin=subprocess.DEVNULL)
        until(lambda: self.log.exists() and "listening on" in self.log.read_text(), "sshd listens")

    def cut(self) -> None:
        """Ends the server and all its connections, as a network that breaks would; not what was started by them."""
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
            if "sshd" in _command(int(pid)):
                os.kill(int(pid), 9)
        self.log.unlink()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


PYTHON = sys.executable


def none_alive(pids: list[int], seconds: float = 10.0) -> bool:
    """Whether all have ended, within so long."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))

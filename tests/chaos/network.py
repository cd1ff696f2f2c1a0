"""Hosts with addresses of their own: network namespaces around a switch, whose cables fail in many ways."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence

NOWHERE = "02:00:00:00:00:ff"  # an address of no card: packets to it are lost silently


def objection() -> str:
    """The reason why no network can be made here; "" if it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "hosts with addresses of their own need root and `ip` (iproute2) for network namespaces"
    name = f"mnb{secrets.token_hex(3)}"
    tried = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if tried.returncode:
        return f"this system lets nobody make network namespaces ({tried.stderr.strip()})"
    try:
        _run("ip", "-n", name, "link", "add", "name", "switch", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"this system has no bridges ({error.stderr.strip()})"
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    return ""


class Network:
    """End 0 is the controller's, the others are hosts."""

    def __init__(self, ends: int) -> None:
        mark = secrets.token_hex(2)
        self._switch = f"mnb{mark}s"
        self.names = [f"mnb{mark}{end}" for end in range(ends)]
        self.addresses = [f"10.213.78.{end + 1}" for end in range(ends)]
        complete = False
        try:
            _run("ip", "netns", "add", self._switch)
            self._in(self._switch, "link", "add", "name", "switch", "type", "bridge")
            self._in(self._switch, "link", "set", "dev", "switch", "up")
            for end, name in enumerate(self.names):
                _run("ip", "netns", "add", name)
                port = f"port{end}"
                words = ("name", port, "type", "veth", "peer", "name", "card", "netns", name)
                self._in(self._switch, "link", "add", *words)
                self._in(self._switch, "link", "set", "dev", port, "master", "switch", "up")
                self._in(name, "address", "add", f"{self.addresses[end]}/24", "dev", "card")
                self._in(name, "link", "set", "card", "up")
                self._in(name, "link", "set", "lo", "up")
            self._cards = [
                _run("ip", "netns", "exec", name, "cat", "/sys/class/net/card/address") for name in self.names
            ]
            self.emulates = self._tries_netem()
            complete = True
        finally:
            if not complete:
                self.close()

    def inside(self, end: int) -> tuple[str, ...]:
        """The words before a command that is to run there."""
        return ("ip", "netns", "exec", self.names[end])

    def pull(self, end: int) -> None:
        self._in(self._switch, "link", "set", f"port{end}", "down")

    def plug(self, end: int) -> None:
        self._in(self._switch, "link", "set", f"port{end}", "up")

    def move(self, end: int) -> None:
        """It has another address from now on, as a laptop in another network; nobody there has the old one."""
        name, old = self.names[end], self.addresses[end]
        host = int(old.rpartition(".")[2])
        new = f"10.213.78.{host + len(self.names) if host < 255 - 2 * len(self.names) else end + 1}"
        self._in(name, "address", "del", f"{old}/24", "dev", "card")
        self._in(name, "address", "add", f"{new}/24", "dev", "card")
        self.addresses[end] = new
        for peer in self.names:  # whose neighbour tables may have it
            words = ["ip", "-n", peer, "neigh", "del", old, "dev", "card"]
            subprocess.run(words, check=False, capture_output=True)

    def deafen(self, sender: int, receiver: int) -> None:
        """Packets from `sender` to `receiver` are lost, and neither sees why; the other way all is well."""
        self._neighbour(sender, receiver, NOWHERE)

    def hear(self, sender: int, receiver: int) -> None:
        """Packets from `sender` to `receiver` arrive again."""
        self._neighbour(sender, receiver, self._cards[receiver])

    def slow(self, end: int, kilobits: int, queue: int) -> None:
        """Its cable carries so much in a second, both ways; more than `queue` bytes that wait are lost."""
        for name, card in ((self.names[end], "card"), (self._switch, f"port{end}")):
            words = ["tbf", "rate", f"{kilobits}kbit", "burst", "3200", "limit", str(queue)]
            self._shape(name, card, words)

    def lossy(self, end: int, percent: float, delay_ms: int) -> None:
        """Packets to and from it are late, and some never come; where the kernel cannot do that, a short queue."""
        if not self.emulates:
            self.slow(end, 1500, 6000)
            return
        for name, card in ((self.names[end], "card"), (self._switch, f"port{end}")):
            self._shape(name, card, ["netem", "delay", f"{delay_ms}ms", "loss", f"{percent:g}%"])

    def free(self, end: int) -> None:
        """Its cable is as fast as it was."""
        for name, card in ((self.names[end], "card"), (self._switch, f"port{end}")):
            words = ["ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", card, "root"]
            subprocess.run(words, check=False, capture_output=True)

    def close(self) -> None:
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def _neighbour(self, sender: int, receiver: int, card: str) -> None:
        self._in(self.names[sender], "neigh", "replace", self.addresses[receiver], "lladdr", card, "nud", "permanent",
                 "dev", "card")  # fmt: skip

    def _tries_netem(self) -> bool:
        try:
            self._shape(self.names[0], "card", ["netem", "delay", "1ms"])
        except (subprocess.CalledProcessError, FileNotFoundError):
            return False
        self.free(0)
        return True

    def _shape(self, name: str, card: str, words: Sequence[str]) -> None:
        _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", card, "root", *words)

    def _in(self, name: str, *words: str) -> None:
        _run("ip", "-n", name, *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

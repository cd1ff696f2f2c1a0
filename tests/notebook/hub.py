"""A JupyterHub with its own proxy, and a service that ends servers which look idle."""

import contextlib
import http.client
import json
import os
import secrets
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.kernels import PATH
from scripts.processes import MARK
from tests.ports import free_port

USER = "me"
IDLE_SECONDS = 6
_CONFIG = """
c = get_config()
c.JupyterHub.bind_url = "http://127.0.0.1:{port}/"
c.JupyterHub.hub_port = {hub}
c.JupyterHub.spawner_class = "simple"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.last_activity_interval = 1
c.JupyterHub.cleanup_servers = True
c.ConfigurableHTTPProxy.command = {proxy!r}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api}"
c.ConfigurableHTTPProxy.pid_file = {folder!r} + "/proxy.pid"
c.JupyterHub.cookie_secret_file = {folder!r} + "/cookie_secret"
c.JupyterHub.db_url = "sqlite:///" + {folder!r} + "/hub.sqlite"
c.SimpleLocalProcessSpawner.home_dir_template = {folder!r} + "/home"
c.Spawner.environment = {environment!r}
c.Spawner.args = ["--allow-root"]
c.JupyterHub.services = [
    {{"name": "tests", "api_token": {token!r}}},
    {{"name": "culler", "command": [{python!r}, "-m", "jupyterhub_idle_culler", "--timeout={idle}", "--cull-every=1"]}},
]
c.JupyterHub.load_roles = [
    {{"name": "tests", "services": ["tests"], "scopes": ["admin:users", "admin:servers", "access:servers"]}},
    {{"name": "culler", "services": ["culler"],
      "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"]}},
]
"""


class Hub:
    """A running JupyterHub, as a browser of its only user has it."""

    def __init__(self, port: int, token: str, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.token = token
        self.log = log

    def ask(self, method: str, path: str, seconds: float = 30) -> Any:
        """The answer of the Hub, or of the user's server behind its proxy."""
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, b"{}" if method == "POST" else None, headers, method=method)
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def serves(self) -> bool:
        """Whether the user's server runs."""
        return bool(self.ask("GET", f"/hub/api/users/{USER}")["servers"])

    def start(self) -> None:
        """Starts the user's server, as a visit to its page does."""
        self.ask("POST", f"/hub/api/users/{USER}/server", 60)
        self._until(lambda: self.ask("GET", f"/hub/api/users/{USER}")["servers"][""]["ready"])

    def stop(self) -> None:
        """Ends it, as its page's button does."""
        self.ask("DELETE", f"/hub/api/users/{USER}/server", 60)
        self._until(lambda: not self.serves())

    def kernel(self) -> str:
        """A new kernel; its id."""
        return str(self.ask("POST", f"/user/{USER}/api/kernels")["id"])

    def culled(self, seconds: float = 60) -> None:
        """Waits until the server was ended as idle."""
        self._until(lambda: not self.serves(), seconds)
        assert "Culling server" in self.log.read_text()

    def _until(self, condition: Any, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(urllib.error.URLError, http.client.HTTPException, ConnectionError, KeyError):
                if condition():
                    return
            assert time.monotonic() < deadline, self.log.read_text()[-6000:]
            time.sleep(0.2)


@contextlib.contextmanager
def hub(folder: Path, python: Path, proxy: Path, mark: str) -> Iterator[Hub]:
    """Starts a Hub. Its servers, their kernels and children have `mark` in their environment."""
    port, token, log = free_port(), secrets.token_hex(16), folder / "hub.log"
    (folder / "home").mkdir(parents=True)
    environment = {
        MARK: mark,
        "PYTHONPATH": PATH,
        "MONARCH_NB_PRELOAD": "",
        "XDG_STATE_HOME": str(folder / "state"),
        "JUPYTERHUB_ACTIVITY_INTERVAL": "1",
        "JUPYTERHUB_SINGLEUSER_APP": "jupyter_server.serverapp.ServerApp",
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    config = folder / "jupyterhub_config.py"
    config.write_text(
        _CONFIG.format(
            port=port,
            hub=free_port(),
            api=free_port(),
            token=token,
            idle=IDLE_SECONDS,
            proxy=[str(proxy)],
            python=str(python),
            folder=str(folder),
            environment=environment,
        )
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(python), "-m", "jupyterhub", "-f", str(config)],
            cwd=folder,
            env={**os.environ, "PATH": environment["PATH"], "JUPYTERHUB_CRYPT_KEY": secrets.token_hex(32)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    started = Hub(port, token, log)
    try:
        started._until(lambda: process.poll() is None and started.ask("GET", "/hub/api/")["version"])
        started.ask("POST", f"/hub/api/users/{USER}")
        yield started
    finally:
        process.terminate()  # it ends its servers and its proxy
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

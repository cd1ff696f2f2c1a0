"""A stub of Kubernetes' API, as far as jobs use it, whose pods are processes of this machine, each at an address of
its own. It is no Kubernetes: what it refuses and how its pods begin is what a test tells it.
"""

import base64
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from tests.ports import own_address

_MESHES = "/apis/monarch.pytorch.org/"
# `kubectl port-forward`, to the first pod alone
KUBECTL = """#!{python}
import re, socket, sys, threading
name, port = [word for word in sys.argv if word.startswith("pod/")][0], sys.argv[-1].lstrip(":")
door = socket.create_server(("127.0.0.1", 0))
print(f"Forwarding from 127.0.0.1:{{door.getsockname()[1]}} -> {{port}}", flush=True)
def pump(a, b):
    while data := a.recv(65536):
        b.sendall(data)
    b.shutdown(socket.SHUT_RDWR)  # a close alone would wait for the other direction
while True:
    client, _ = door.accept()
    try:
        target = socket.create_connection((open("{first}").read(), int(port)))
    except OSError:
        client.close()
        continue
    for pair in ((client, target), (target, client)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


class Cluster:
    """Objects by path; `operator` says whether MonarchMesh resources are known."""

    def __init__(self, folder: Path, *, operator: bool) -> None:
        self.folder = folder
        self.operator = operator
        self.objects: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.held = False  # pods stay pending
        self.nodes: list[dict[str, Any]] | None = None  # None: this user may not list them
        self.events: dict[str, list[dict[str, Any]]] = {}  # by the selector of their object
        self.refused = False  # the set makes no pods
        self.asked: list[str] = []
        self._count = 0  # pods
        self._lock = threading.RLock()
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or "null")
                status, data = cluster.handle(self.command, self.path, body)
                text = data.encode() if isinstance(data, str) else json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815 - the base class calls these

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, name="pytest_timeout stub", daemon=True).start()
        self.config = folder / "kubeconfig"
        self.config.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "stub",
            "clusters": [{"name": "stub", "cluster": {"server": f"http://127.0.0.1:{self.server.server_port}"}}],
            "users": [{"name": "stub", "user": {"token": "t"}}],
            "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "stub"}}],
        }))  # fmt: skip

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for name in list(self.pods):
            self.delete_pod(name)

    def kubectl(self) -> Path:
        """The folder of a `kubectl` that forwards ports to the first pod, and can do nothing else."""
        tools = self.folder / "bin"
        tools.mkdir()
        program = tools / "kubectl"
        program.write_text(KUBECTL.format(python=sys.executable, first=self.folder / "first"))
        program.chmod(0o755)
        return tools

    def handle(self, verb: str, url: str, body: Any) -> tuple[int, Any]:
        path, query = urlparse(url).path, parse_qs(urlparse(url).query)
        with self._lock:
            self.asked.append(f"{verb} {path}")
            if path.startswith(_MESHES) and not self.operator:
                return 404, {"message": "the server could not find the requested resource"}
            if verb == "POST":
                return self._post(path, body)
            if verb == "DELETE" and "/pods/" in path:
                self.delete_pod(path.rpartition("/")[2], body["gracePeriodSeconds"])
                return 200, {"status": "Success"}
            if path == "/api/v1/nodes":
                return (403, {"message": "forbidden"}) if self.nodes is None else (200, {"items": self.nodes})
            if path.endswith("/events"):
                return 200, {"items": self.events.get(query["fieldSelector"][0].split(",")[0], [])}
            if path.endswith("/pods"):
                return 200, {"items": self._selected(query["labelSelector"][0])}
            if path.endswith("/log"):
                return 200, self.log(path.split("/")[-2])
            if path not in self.objects:
                return 404, {"message": f'"{path.rpartition("/")[2]}" not found'}
            if verb == "DELETE":
                self._deleted(self.objects.pop(path))
                return 200, {"status": "Success"}
            if verb == "PATCH" and "data" in body:
                self.objects[path]["data"] |= body["data"]
            elif verb == "PATCH":
                self.scale(self.objects[path], body["spec"]["replicas"])
            return 200, self.objects[path]

    def _post(self, path: str, body: Any) -> tuple[int, Any]:
        name = body["metadata"]["name"]
        if f"{path}/{name}" in self.objects:
            return 409, {"message": f'"{name}" already exists'}
        self.objects[f"{path}/{name}"] = body
        spec = body.get("spec") or {}
        template = spec.get("podTemplate") or spec.get("template")
        if template:
            self.scale(body, spec["replicas"])
        return 201, body

    def scale(self, resource: dict[str, Any], replicas: int) -> None:
        """As the controller of a StatefulSet does: the last pods are added and removed."""
        name, spec = resource["metadata"]["name"], resource["spec"]
        spec["replicas"] = replicas
        for rank in range(0 if self.refused else replicas):
            if f"{name}-{rank}" not in self.pods:
                self.add_pod(f"{name}-{rank}", rank, spec.get("podTemplate") or spec["template"])
        for pod in [pod for pod in self.pods if pod.rpartition("-")[0] == name]:
            if int(pod.rpartition("-")[2]) >= replicas:
                self.delete_pod(pod)

    def _deleted(self, resource: dict[str, Any]) -> None:
        if resource.get("kind") in ("MonarchMesh", "StatefulSet"):
            for name in [pod for pod in self.pods if pod.rpartition("-")[0] == resource["metadata"]["name"]]:
                self.pods[name]["metadata"]["deletionTimestamp"] = "now"
                if name in self.processes:
                    self.processes[name].terminate()

    def _selected(self, selector: str) -> list[dict[str, Any]]:
        labels = dict(part.split("=") for part in selector.split(","))
        return [pod for pod in self.pods.values() if labels.items() <= pod["metadata"]["labels"].items()]

    def add_pod(self, name: str, rank: int, template: dict[str, Any]) -> None:
        labels = {**template["metadata"]["labels"], "apps.kubernetes.io/pod-index": str(rank)}
        reason = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/4 nodes have GPUs",
        }
        self._count += 1
        self.pods[name] = {
            "metadata": {"name": name, "labels": labels, "uid": str(self._count)}, "spec": template["spec"],
            "status": {"phase": "Pending", "conditions": [reason]},
        }  # fmt: skip
        if not self.held:
            self.run_pod(name)

    def run_pod(self, name: str) -> None:
        """As a kubelet would: mounts Secrets, runs the command of the first container, gives the pod an address."""
        pod = self.pods[name]
        address = own_address()
        first = self.folder / "first"
        if not first.exists():
            first.write_text(address)
        root = self.folder / name
        root.mkdir(exist_ok=True)
        [container] = pod["spec"]["containers"]
        env = dict(os.environ)
        for variable in container["env"]:
            reference = (variable.get("valueFrom") or {}).get("secretKeyRef")
            env[variable["name"]] = variable["value"] if reference is None else self._secret(**reference).decode()
        for volume in pod["spec"]["volumes"]:
            for item in (volume.get("secret") or {}).get("items", ()):
                data = root / f"..data-{item['path']}"
                data.write_bytes(self._secret(volume["secret"]["secretName"], item["key"]))
                data.chmod(0o444)
                (root / item["path"]).unlink(missing_ok=True)
                (root / item["path"]).symlink_to(data)  # as kubelets do
        [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "monarch-key"]
        line = [re.sub(r"tcp://0\.0\.0\.0:", f"tcp://{address}:", word).replace(mount["mountPath"], str(root))
                for word in (*container["command"], *container.get("args", ()))]  # fmt: skip
        line[0] = sys.executable
        with open(root / "log", "ab") as log:
            self.processes[name] = subprocess.Popen(line, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        ready = [{"type": "Ready", "status": "True"}]
        pod["status"] = {"phase": "Running", "podIP": address, "conditions": ready}

    def _secret(self, name: str, key: str) -> bytes:
        [secret] = [resource for path, resource in self.objects.items() if path.endswith(f"/secrets/{name}")]
        return base64.b64decode(secret["data"][key])

    def delete_pod(self, name: str, grace: float = 20.0) -> None:
        self.pods.pop(name)
        process = self.processes.get(name)
        if process is not None:
            process.terminate()
            try:
                process.wait(grace)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)

    def evict(self, name: str) -> None:
        status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
        self.pods[name]["status"] = status
        self.processes[name].terminate()

    def make_anew(self, name: str) -> None:
        """Replaces an ended pod, as the controller does."""
        pod = self.pods[name]
        self.delete_pod(name)
        self.add_pod(name, int(name.rpartition("-")[2]), {"metadata": pod["metadata"], "spec": pod["spec"]})

    def log(self, name: str) -> str:
        return (self.folder / name / "log").read_text()

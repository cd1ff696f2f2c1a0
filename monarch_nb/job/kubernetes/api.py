"""Requests to a cluster's API."""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from monarch_nb.job.adapter import EngineError
from monarch_nb.job.kubernetes.config import api_client

_SECONDS = 30.0


class NotThereError(EngineError):
    """The API knows nothing of that path."""


def create(options: Mapping[str, Any], path: str, body: Mapping[str, Any]) -> None:
    """Makes what is not there yet. Raises EngineError."""
    try:
        call(options, "POST", path, body=body)
    except EngineError as error:
        if "(409)" not in str(error):
            raise
        raise EngineError(
            f"there is a {body['kind']} {body['metadata']['name']} in namespace {options['namespace']} already, of "
            "another job: kill that one, choose another name, or attach to its pods by add_mesh without an image"
        ) from None


def call(
    options: Mapping[str, Any], verb: str, path: str, *, body: Any = None, query: Sequence[tuple[str, str]] = (),
    plain: bool = False,
) -> Any:  # fmt: skip
    """One request to the API. Raises EngineError, with its words."""
    client = api_client(options.get("kubeconfig", ""))
    sent = "application/merge-patch+json" if verb == "PATCH" else "application/json"
    headers = {"Accept": "*/*" if plain else "application/json", "Content-Type": sent}
    try:
        # The client's own connection and credentials, whose interface is the same in all its versions.
        for each in client.configuration.auth_settings().values():
            if each["in"] == "header" and each["value"]:
                headers[each["key"]] = each["value"]
        url = f"{client.configuration.host}{path}{f'?{urlencode(query)}' if query else ''}"
        data = None if body is None else json.dumps(body)
        response = client.rest_client.pool_manager.request(
            verb, url, headers=headers, body=data, timeout=_SECONDS, retries=1
        )
        status, text = response.status, response.data.decode(errors="replace")
    except Exception as error:  # of urllib3, in many kinds
        raise EngineError(f"the Kubernetes API does not answer: {type(error).__name__}: {error}") from None
    finally:
        client.close()
    if status == 404:
        raise NotThereError(f"Kubernetes knows no {path}: {_message(text)}")
    if status >= 400:
        raise EngineError(f"Kubernetes refuses {verb} {path} ({status}): {_message(text)}")
    return text if plain else json.loads(text or "{}")


def _message(body: Any) -> str:
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(body or "").strip()[:200]

"""The arguments of the command `ssh`, as far as they say how to connect, read for a client that is not that command."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(
            f"ssh_args: {message}; -i, -p, -l, -F, -J and -o UserKnownHostsFile=FILE are understood here, "
            "all else belongs into ~/.ssh/config"
        )


def read_ssh_args(words: Sequence[str]) -> dict[str, Any]:
    """What they mean to asyncssh, as plain data. Raises ValueError for one that is not understood."""
    parser = _Parser(add_help=False)
    parser.add_argument("-i", dest="client_keys", action="append")
    parser.add_argument("-p", dest="ssh_port", type=int)
    parser.add_argument("-l", dest="username")
    parser.add_argument("-F", dest="config", action="append")
    parser.add_argument("-J", dest="tunnel")
    parser.add_argument("-o", dest="settings", action="append", default=[])
    given = vars(parser.parse_args(list(words)))
    for setting in given.pop("settings"):
        name, _, value = setting.partition("=")
        if name.lower() != "userknownhostsfile" or not value:
            parser.error(f"-o {setting} is not understood")
        given["known_hosts"] = value
    return {name: value for name, value in given.items() if value is not None}

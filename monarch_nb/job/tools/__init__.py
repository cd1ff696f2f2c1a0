"""Tools for the hosts of a job: commands, shells and forwarded ports. Each is loaded at its first use."""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names

if TYPE_CHECKING:
    from monarch_nb.job.tools.commands import exec_command, shell
    from monarch_nb.job.tools.forwarding import PortForwarder

__all__ = ["PortForwarder", "exec_command", "shell"]

__getattr__ = lazy_names(__name__, {"commands": ("exec_command", "shell"), "forwarding": ("PortForwarder",)})

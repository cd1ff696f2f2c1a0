"""The program that becomes a process of a mesh: `python -m monarch._src.actor.bootstrap_main`.

A BootstrapCommand of the user's own may run it instead of the command of `default_bootstrap_cmd()`. A host agent starts
it, with open descriptors that its environment names; started by hand, it prints that and exits.
"""

import os
import sys
from typing import NoReturn

from monarch_nb.host.procs.proc_main import DESCRIPTORS, main


def invoke_main() -> NoReturn:
    """Runs a process of a mesh until it ends, and exits with its status."""
    if DESCRIPTORS not in os.environ:
        sys.exit(
            "bootstrap_main: a host agent starts this program, as part of a BootstrapCommand. To make this machine a "
            "host, run monarch.actor.run_worker_loop_forever(address=..., ca=...)"
        )
    sys.exit(main([]))


__all__ = ["invoke_main", "main"]

if __name__ == "__main__":
    invoke_main()

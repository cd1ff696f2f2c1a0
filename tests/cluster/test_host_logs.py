"""Logs that procs write."""

import os

import pytest

from monarch_nb.logs.spool import ERR, OUT, TEXT
from tests.cluster.host_client import hosted

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("cold", [False, True])
def test_a_full_disk_does_not_harm_a_proc(cold: bool) -> None:
    with hosted(prewarm=not cold) as (handle, client):
        # Its spool file is a device that is always full.
        for kind in (TEXT, OUT, ERR):
            os.symlink("/dev/full", handle.run_folder / "spool" / f"p0.0.0{kind}")
        [address] = client.spawn(1, "floods", bootstrap_env_cold=cold)
        assert client.exited(address)[0].exitcode == 5

"""The batch script of a Slurm job."""

import re
import shlex
from collections.abc import Sequence

from monarch_nb.host.preemption import END
from monarch_nb.job.adapter import AgentsWanted
from monarch_nb.job.batch.shared import worker_line

OTHERS = "others"  # the file in a job's folder with the numbers of batch jobs that end with the one of the client
_OPTION = re.compile(r"-[-\w]+([ =].*)?")
# One agent a node, with all that the batch job has there; those of other nodes live on when one ends.
_SRUN = "srun --ntasks={nodes} --ntasks-per-node=1 --cpu-bind=none --wait=0 --kill-on-bad-exit=0 --label"


def script(wanted: AgentsWanted, names: Sequence[str], file: str, number: int) -> str:
    """The text for sbatch, for hosts that are alike."""
    given, role = wanted.options, wanted.role(names[0])
    logs = given.get("log_dir") or wanted.folder
    options = {
        "job-name": given.get("job_name", "monarch_job"),
        "nodes": len(names),
        "nodelist": ",".join(wanted.places) or None,
        "ntasks-per-node": given.get("ntasks_per_node", 1),
        "output": f"{logs}/slurm_%j_{number}.out",
        "time": given.get("time_limit"),
        "partition": given.get("partition"),
        "account": given.get("account"),
        "qos": given.get("qos"),
        "gpus-per-node": role.gpus if role.gpus is not None else given.get("gpus_per_node"),
        "cpus-per-task": role.cpus if role.cpus is not None else given.get("cpus_per_task"),
        "mem": role.memory or given.get("mem"),
        "container-image": role.image or None,
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}={_plain(name, value)}" for name, value in options.items() if value is not None]
    # A job that begins anew has other hosts, and one lost node is no reason to take the others away.
    lines += ["#SBATCH --no-requeue", "#SBATCH --no-kill"]
    lines += ["#SBATCH --exclusive"] if given.get("exclusive", True) else []
    lines += [f"#SBATCH {_plain('slurm_args', word)}" for word in given.get("slurm_args", ()) if _OPTION.match(word)]
    work = f"{_SRUN.format(nodes=len(names))} {worker_line(wanted, file, 'SLURM_PROCID', '$SLURMD_NODENAME')}"
    client = given.get("client_script")
    if client is None or number:
        # SIGTERM is for the agents, which Slurm sends it as well: srun would answer it by killing them at once.
        return "\n".join([
            *lines,
            "set -m; trap : TERM",
            f"{work} &",
            "while wait $!; status=$?; [ $status -gt 128 ] && kill -0 $! 2>/dev/null; do :; done",
            "exit $status",
            "",
        ])  # fmt: skip
    python, job_file = shlex.quote(str(given.get("python", "python3"))), shlex.quote(str(wanted.folder / "batch.json"))
    return "\n".join([
        *lines,
        f"{work} &",
        f"until [ -s {job_file} ]; do sleep 0.2; done",
        f"MONARCH_BATCH_JOB=1 MONARCH_NB_BATCH_JOB={job_file} {python} {shlex.quote(str(client))}",
        "status=$?",
        f"others=$(cat {shlex.quote(str(wanted.folder / OTHERS))} 2>/dev/null)",
        f"scancel --quiet --signal={END.name[3:]} $SLURM_JOB_ID $others",
        '[ -z "$others" ] || scancel --quiet $others',
        "wait",
        "exit $status",
        "",
    ])  # fmt: skip


def _plain(name: str, value: object) -> str:
    text = str(value)
    if "\n" in text or "\r" in text:
        raise ValueError(f"{name}={text!r} has more than one line")
    return text

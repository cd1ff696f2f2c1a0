"""The doctor's checks of the facts of a machine: each problem is found, and the advice says what to type."""

import msgspec
import pytest

from monarch_nb.doctor import Check, Facts, facts_of_this_machine, judge, table

GOOD = Facts(
    host="node1",
    python="3.11.7",
    executable="/usr/bin/python3",
    versions={"monarch-nb": "0.1.0", "pyzmq": "27.1.0", "msgspec": "0.19.0", "cloudpickle": "3.1.0"},
    files=(65536, 65536),
    processes=100_000,
    memory_files=True,
    shared_memory=8 << 30,
    run_folder="/run/user/1000",
    run_folder_problem="",
    free_disk=100 << 30,
    loopback_problem="",
    name_resolves=True,
    quick_start=True,
    gpus=0,
)

NIXL = {**GOOD.versions, "nixl-cu12": "1.5.1"}


def levels(facts: Facts, controller: Facts | None = None) -> dict[str, str]:
    return {finding.about: finding.level for finding in judge(facts, controller)}


def problem(facts: Facts, controller: Facts | None = None) -> Check:
    (check,) = (finding for finding in judge(facts, controller) if finding.level != "ok")
    return check


def vary(**changes: object) -> Facts:
    return msgspec.structs.replace(GOOD, **changes)


def test_a_machine_that_has_everything_gets_no_advice() -> None:
    assert set(levels(GOOD).values()) == {"ok"}
    assert not [finding for finding in judge(GOOD) if finding.advice]
    assert levels(vary(rdma=("rxe0",), versions=NIXL))["RDMA"] == "ok"


@pytest.mark.parametrize(
    ("facts", "level", "advice"),
    [
        (vary(files=(256, 65536)), "warning", "ulimit -n 65536"),
        (vary(files=(256, 256)), "error", "limits.conf"),
        (vary(processes=20), "warning", "ulimit -u"),
        (vary(memory_files=False), "warning", "memfd"),
        (vary(shared_memory=64 << 20), "warning", "--shm-size"),
        (vary(shared_memory=None), "warning", "/dev/shm"),
        (vary(run_folder_problem="no space is left"), "error", "TMPDIR"),
        (vary(free_disk=10 << 20), "warning", "log_folder"),
        (vary(loopback_problem="Operation not permitted"), "error", "127.0.0.1"),
        (vary(name_resolves=False), "warning", "/etc/hosts"),
        (vary(quick_start=False), "warning", "seconds"),
        (vary(rdma=("mlx5_0",)), "warning", "monarch-nb[rdma]"),
        (vary(rdma_closed=("mlx5_0",)), "warning", "/dev/infiniband/uverbs"),
        (vary(rdma=("rxe0",), versions=NIXL, locked_memory=8 << 20), "warning", "memlock"),
        (vary(versions={**GOOD.versions, "torchmonarch": "0.3.0"}), "warning", "%load_ext monarch_nb"),
        (vary(versions={**GOOD.versions, "pyzmq": ""}), "error", "pip install"),
        (vary(python="3.10.4"), "error", "3.11"),
    ],
)
def test_faults_of_a_machine_are_reported_with_the_remedy(facts: Facts, level: str, advice: str) -> None:
    check = problem(facts)
    assert check.level == level
    assert advice in check.found + check.advice
    assert check.advice


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        (vary(python="3.12.1"), "error"),
        (vary(versions={**GOOD.versions, "monarch-nb": "0.0.9"}), "error"),
        (vary(versions={**GOOD.versions, "cloudpickle": "3.0.0"}), "ok"),
        (vary(versions={**GOOD.versions, "torch": "2.9.0"}), "ok"),
    ],
)
def test_a_host_is_compared_with_the_controller(facts: Facts, level: str) -> None:
    verdicts = levels(facts, GOOD)
    assert verdicts["versions" if "versions" in verdicts else "Python"] is not None
    worst = "error" if "error" in verdicts.values() else "warning" if "warning" in verdicts.values() else "ok"
    assert worst == level


def test_another_torch_version_than_the_controllers_is_a_warning_naming_both() -> None:
    ours = vary(versions={**GOOD.versions, "torch": "2.11.0"})
    theirs = vary(versions={**GOOD.versions, "torch": "2.9.0"})
    check = problem(theirs, ours)
    assert check.level == "warning"
    assert "2.9.0" in check.found
    assert "2.11.0" in check.found


def test_the_facts_of_this_machine_are_found_and_travel() -> None:
    facts = facts_of_this_machine()
    assert msgspec.json.decode(msgspec.json.encode(facts), type=Facts) == facts
    assert facts.versions["monarch-nb"]
    assert "error" not in levels(facts).values()


def test_the_table_shows_what_is_wrong_with_its_advice_below() -> None:
    text = table([Check("kernel", "ok", "ipykernel 7.4.0"), Check("shared memory", "warning", "64 MB", "enlarge it")])
    assert text.splitlines() == [
        "✓ kernel         ipykernel 7.4.0",
        "! shared memory  64 MB",
        "                 enlarge it",
    ]


def with_gpus(**changes: object) -> Check:
    """The check of the GPUs of a good machine that has two, with some changes."""
    facts = vary(
        gpus=2,
        gpu_models=("NVIDIA H100", "NVIDIA H100"),
        gpu_driver="580.159.04",
        torch_cuda="13.0",
        gpu_packages=(("NCCL", "2.28.9"), ("cuda-bindings", "13.3.1"), ("nvidia-ml-py", "13.610")),
    )
    return next(finding for finding in judge(msgspec.structs.replace(facts, **changes)) if finding.about == "GPUs")


def test_gpus_are_shown_with_driver_pytorch_and_nccl() -> None:
    check = with_gpus()
    assert check.level == "ok"
    assert check.found.startswith("2 × NVIDIA H100, driver 580.159.04, PyTorch for CUDA 13.0, NCCL 2.28.9")


def test_what_keeps_processes_from_the_gpus_is_said_with_its_remedy() -> None:
    old = with_gpus(gpu_driver="535.54.03")
    assert (old.level, "needs driver 580 or newer" in old.advice) == ("error", True)
    no_cuda = with_gpus(torch_cuda="")
    assert (no_cuda.level, "without CUDA" in no_cuda.found) == ("warning", True)
    packages = with_gpus(gpu_packages=(("NCCL", "2"), ("cuda-bindings", ""), ("nvidia-ml-py", "13")))
    assert (packages.level, "monarch-nb[gpu]" in packages.advice) == ("warning", True)

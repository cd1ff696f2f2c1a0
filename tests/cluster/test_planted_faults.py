"""A few of the planted faults and healthy programs of tests/planted_faults, and the page about them all."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from monarch_nb.diagnosis import Finding
from tests.cluster.fault_tools import ROOT
from tests.planted_faults.cases import FAULTY, HEALTHY, Case
from tests.planted_faults.page import PAGE, page, read
from tests.planted_faults.runner import Looks, Outcome, run

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10),
        reason="this PyTorch records no collectives of gloo",
    ),
]
CASES = {case.name: case for case in (*FAULTY, *HEALTHY)}
SUSPECT = Finding("stuck", "planted", (1,), "it sits")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("rows and columns: queue at row, 1 of 4", marks=pytest.mark.slow),
        pytest.param("mixed collectives: skip at data, 1 of 2", marks=pytest.mark.slow),
        "no collectives: sleeps at data, 1 of 3",
    ],
)
def test_planted_faults_are_found_and_healthy_programs_left_alone(name: str) -> None:
    outcome = run(CASES[name], 1)
    assert outcome.grade == "right" or (not CASES[name].kind and outcome.grade == "unsure"), outcome


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_fault_of_each_kind_is_found() -> None:
    names = {case.kind: case.name for case in (*FAULTY, *HEALTHY)}.values()
    done = subprocess.run(
        [sys.executable, "-m", "tests.planted_faults", "--seeds", "7", "--only", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_answers_are_graded_by_what_was_planted() -> None:
    case = Case("all_reduce", "queue", "stuck")
    for finding, grade in (
        (SUSPECT, "right"),
        (replace(SUSPECT, sure=False), "unsure"),
        (replace(SUSPECT, ranks=(0, 1)), "wrong"),
        (replace(SUSPECT, kind="dead"), "wrong"),
    ):
        looks = Looks(case, (1,))
        looks.add((finding,))
        looks.add(())
        assert looks.outcome(1).grade == grade
    healthy = Looks(replace(case, kind=""), (1,))
    assert healthy.outcome(1).grade == "right"
    healthy.add((SUSPECT,))
    assert healthy.outcome(1).grade == "wrong"


def test_the_page_names_all_cases_and_no_wrong_answer() -> None:
    named = read(PAGE.read_text(encoding="utf-8"))
    kinds: dict[str, list[str]] = {}
    for case in (*FAULTY, *HEALTHY):
        kinds.setdefault(case.kind or "healthy", []).append(case.name)
    assert named == kinds, "make planted-faults writes docs/diagnosis.md"
    assert len(CASES) == len(FAULTY) + len(HEALTHY)
    assert len(FAULTY) >= 60
    assert len(HEALTHY) >= 40


def test_the_page_counts_planted_and_found() -> None:
    outcomes = [
        Outcome("a", 1, "stuck", "stuck", "right", 3.0, 0.5, 4),
        Outcome("b", 1, "stuck", "", "silent", looks=9),
        Outcome("c", 1, "healthy", "", "right", looks=10),
    ]
    text = page(outcomes, "2 cases at a time")
    assert "**1 of 2 answers about planted faults are right (50.0 %), none wrong. Not one of 1 runs" in text
    assert "| stuck | **1** | 1 |" in text
    assert "| stuck | 1 | 1 |  |  |  | 3.0 s, 3.0 s | 0.5 s, 0.5 s |" in text
    assert "| stuck: b | 1 | silent: silence |" in text

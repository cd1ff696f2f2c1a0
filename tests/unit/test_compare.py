"""Counts and tables of `make compare`; its programs of ours run."""

import pytest

from benchmarks.compare.__main__ import OURS, STORIES, SYSTEMS, program_of, run
from benchmarks.compare.lines import lines_of
from benchmarks.compare.report import best, markdown

pytestmark = pytest.mark.timeout(120)


def test_words_and_what_only_measures_are_no_lines_of_a_program() -> None:
    source = '"""What it is."""\n\n# why\nbegan = now()\ndo()  # it\nfact("seconds", now() - began)\n'
    assert lines_of(source) == 1


def test_the_best_of_all_turns_counts_and_the_last_words() -> None:
    result = best([{"seconds": 2.0, "what is said": "a"}, {"seconds": 1.0, "what is said": "gpus=5 in normalised"}])
    assert (result["seconds"], result["says"], result["where"]) == (1.0, "yes", "yes")


def test_a_missing_program_and_a_failed_one_are_marked_differently() -> None:
    text = markdown({}, {story: {OURS: [{"lines": 3, "wrong": "it died"}]} for story in STORIES}, [OURS, "dask"])
    assert "| ours (did not end well) | 3 |" in text
    assert "| dask | cannot do that |" in text


def test_each_system_has_a_program_for_each_story_but_one() -> None:
    missing = {(story, system) for story in STORIES for system in SYSTEMS if program_of(story, system) is None}
    assert missing == {("elastic", "jupyter-distributed")}


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_our_programs_end_well(story: str) -> None:
    program = program_of(story, OURS)
    assert program is not None
    result = run(story, OURS, program)
    assert "wrong" not in result
    assert result["lines"] > 5

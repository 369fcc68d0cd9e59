"""What cannot be asked for is refused in one sentence, before anything is run."""

from __future__ import annotations

from typing import Any

import pytest

import autotune
from autotune.errors import UserError
from autotune.options import SearchOptions
from tests.report import sample_records


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"budget_seconds": 0.0}, "budget must be above 0, not 0.0"),
        ({"budget_seconds": float("nan")}, "budget must be above 0, not nan"),
        ({"budget_seconds": float("inf")}, "budget has no end"),
        ({"trials": 1.5}, "trials must be a whole number, not 1.5"),
        ({"seed": "a"}, "seed must be a whole number, not 'a'"),
        ({"memory_limit_bytes": 1.5}, "memory_limit must be a whole number, not 1.5"),
        ({"memory_margin": "5%"}, "memory_margin must be a number, not '5%'"),
        ({"global_batch_size": True}, "global_batch_size must be a whole number, not True"),
        ({"trials": 0}, "trials must be above 0, not 0"),
        ({"global_batch_size": -4}, "global_batch_size must be above 0, not -4"),
        ({"memory_limit_bytes": 0}, "memory_limit must be above 0, not 0"),
        ({"train_samples": -1}, "train_samples must be above 0, not -1"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm must be above 0, not 0.0"),
        ({"memory_margin": 5}, "memory_margin is a share of at least 0 and below 1, such as 0.05, not 5"),
        ({"objective": "speed"}, "objective must be throughput or memory, not 'speed'"),
        ({"device": "gpu"}, "device must be cuda or cpu, not 'gpu'"),
        (
            {"free_batch": True, "global_batch_size": 8},
            "global_batch_size holds a batch, and free_batch holds none; give one of them",
        ),
    ],
)
def test_what_no_option_takes_is_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        SearchOptions(**asked)
    assert str(caught.value) == told


def test_fit_refuses_it_before_it_looks_at_the_functions() -> None:
    with pytest.raises(ValueError, match="^device must be cuda or cpu, not 'gpu'$"):
        autotune.fit(dict, dict, device="gpu")


def test_a_gaussian_process_without_scipy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        SearchOptions(strategy="gp")
    assert str(caught.value) == "--strategy gp needs scipy, which is not installed; install torch-autotune[gp]"
    SearchOptions(strategy="tpe")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"budget": None}, 'budget must be a time such as "10m", or a number of seconds, not None'),
        ({"space": 5}, "space must be the name of a space or the path of its file, not 5"),
        ({"only": 5}, "only must be names, in a tuple or in one text with commas between them, not 5"),
        ({"fix": [("a", 1)]}, "fix must be names with values, such as"),
        ({"study": None}, "study must be the path of a directory, not None"),
        ({"on_trial": 5}, "on_trial must be a function of (trial, speedup), not 5"),
    ],
)
def test_fit_refuses_another_kind_of_argument(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        autotune.fit(dict, dict, **asked)
    assert str(caught.value).startswith(told)


def test_a_verification_prints_its_answer_with_what_changed() -> None:
    report = sample_records.verify_report(warnings=("another process used the GPU",))
    assert str(report).splitlines() == [report.verdict, "changed: torch: 2.11 then, 2.12 now", *report.warnings]
    assert repr(report) == f"<VerifyReport: {report.verdict}>"

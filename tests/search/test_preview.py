"""What a search would try is told with what it would not, each with its reason, and with what it would take."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config import Value
from autotune.options import CheckReport, SearchOptions
from autotune.records import SearchFacts
from autotune.search.preview import preview
from autotune.space import build_space
from tests.knobs.search_facts import FACTS, cpu_facts, cuda_facts


def previewed(facts: SearchFacts, *, preset: str = "default", **asked: Any) -> CheckReport:
    return preview(build_space(facts, preset=preset), SearchOptions(space=preset, **asked))


def reasons(report: CheckReport) -> dict[tuple[str, Value | None], str]:
    return {(one.knob, one.value): one.reason for one in report.refused}


def test_what_of_a_loader_cannot_be_changed_is_told_with_its_reason() -> None:
    told = reasons(
        previewed(cpu_facts(batch_fixed_reason="a batch_sampler of its own", workers_fixed_reason="no shard"))
    )
    assert told["batch_size", None] == "a batch_sampler of its own"
    assert told["num_workers", None] == "no shard"


def test_what_the_device_cannot_do_is_told_value_by_value() -> None:
    told = reasons(previewed(cpu_facts()))
    assert told["precision", "fp16"] == "fp16 needs a GPU"
    assert told["compile_mode", "reduce-overhead"] == "reduce-overhead uses CUDA graphs, which need a GPU"
    assert ("precision", "bf16") not in told
    assert ("precision", "fp16") not in reasons(previewed(cuda_facts()))


def test_a_value_that_conflicts_whatever_is_changed_beside_it_is_not_offered() -> None:
    report = previewed(cuda_facts(model_is_compiled=True))
    assert report.offered["compile_mode"] == ("as_is",)
    assert reasons(report)["compile_mode", "default"] == "model_fn compiles the model already"


def test_a_value_that_needs_another_change_beside_it_is_offered() -> None:
    report = previewed(cuda_facts())
    assert report.offered["compile_scope"] == ("model", "step", "blocks")
    assert not any(knob == "compile_scope" for knob, _ in reasons(report))


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())
def test_every_knob_is_offered_or_refused_and_no_value_both(facts: SearchFacts) -> None:
    report = previewed(facts, preset="thorough")
    told = reasons(report)
    for name, values in report.offered.items():
        assert len(values) > 1 or any(knob == name for knob, _ in told)
        assert not any((name, value) in told for value in values)


def test_the_estimate_follows_the_step_and_the_trials_and_stands_beside_the_budget() -> None:
    slow = cpu_facts(step_seconds=2.0)
    short = previewed(slow, budget_seconds=60.0)
    assert short.budget_seconds == 60.0 < short.estimated_search_seconds
    few = previewed(slow, preset="quick", budget_seconds=1e6, trials=4).estimated_search_seconds
    assert few == 4 * 15 * 2.0
    assert previewed(slow, budget_seconds=1e6, trials=4).estimated_search_seconds > few, "it compiles"

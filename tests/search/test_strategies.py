"""What a search measures by another strategy than its own stages, for comparison or to know the whole space."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.knobs.registry import knob
from autotune.records import OUT_OF_MEMORY, Strategy
from autotune.search.exhaust import every_point
from tests.search.promises import hold_promises, what_did_not_fit_is_left_alone
from tests.search.simulated_programs import SCENARIOS
from tests.search.simulated_search import Outcome, SimulatedSearch

NewDirectory = Callable[[], Path]
CPU, SMALL_CARD = SCENARIOS["tables on a CPU"], SCENARIOS["language model in 16 GiB"]
FEW = {"only": ("num_workers", "optimizer_impl")}


def searched(strategy: Strategy, directory: Path, scenario: Any = CPU, **options: Any) -> Outcome:
    chosen = {"memory_limit_bytes": scenario.memory_limit_bytes, "budget_seconds": 300.0, **options}
    return SimulatedSearch(scenario.program, scenario.facts, directory, strategy=strategy, **chosen).run()


@pytest.mark.parametrize("strategy", ["tpe", "gp", "random"])
def test_a_sampler_alone_measures_from_the_first_trial_on_and_keeps_the_promises(
    strategy: Strategy, new_directory: NewDirectory
) -> None:
    outcome = searched(strategy, new_directory(), trials=12, preset="quick")
    hold_promises(outcome)
    stages = [trial.stage for trial in outcome.session.trials if trial.round is None]
    assert stages[0] == "baseline"
    assert set(stages[1:]) == {"explore"}
    assert len(stages) > 8
    assert not outcome.machine.asked("memory")
    assert not outcome.machine.asked("loader")


def test_samplers_draw_other_points(new_directory: NewDirectory) -> None:
    drawn = {
        strategy: tuple(searched(strategy, new_directory(), trials=12, preset="quick").machine.asked("measure"))
        for strategy in ("tpe", "gp", "random")
    }
    assert len(set(drawn.values())) == 3


def test_a_gaussian_process_learns_where_nothing_fits(new_directory: NewDirectory) -> None:
    outcome = searched("gp", new_directory(), SMALL_CARD, trials=14, only=("batch_size", "precision"))
    assert any(t.failure is not None and t.failure.kind in OUT_OF_MEMORY for t in outcome.session.trials)
    what_did_not_fit_is_left_alone(outcome)


def test_exhaustive_measures_every_point_once_and_stops_none_early(new_directory: NewDirectory) -> None:
    outcome = searched("exhaustive", new_directory(), budget_seconds=1e6, **FEW)
    space = outcome.asked.space
    points = [config for config in every_point(space) if space.conflict(config) is None]
    assert len(points) == len(knob("num_workers").choices(CPU.facts)) * len(knob("optimizer_impl").choices(CPU.facts))
    measured = [trial.config for trial in outcome.session.trials if trial.round is None]
    assert sorted(config.key for config in measured) == sorted(config.key for config in points)
    assert not any(t.measurement is not None and t.measurement.stopped_early for t in outcome.session.trials)
    assert outcome.session.skipped == {}


def test_exhaustive_runs_what_does_not_fit_too(new_directory: NewDirectory) -> None:
    outcome = searched(
        "exhaustive", new_directory(), SMALL_CARD, budget_seconds=1e6, only=("batch_size", "activation_checkpointing")
    )
    failed = [t for t in outcome.session.trials if t.failure is not None and t.failure.kind in OUT_OF_MEMORY]
    largest = [t for t in failed if outcome.asked.space.micro_batch(t.config) == outcome.asked.space.batch_sizes[-1]]
    assert len(failed) > 3
    assert largest


def test_exhaustive_goes_on_over_several_calls(new_directory: NewDirectory) -> None:
    directory = new_directory()
    first = searched("exhaustive", directory, budget_seconds=60.0, **FEW)
    assert any("points are not measured yet; the same command goes on" in one for one in first.session.skipped.values())
    before = [t.config for t in first.session.trials if t.round is None]
    second = searched("exhaustive", directory, budget_seconds=1e6, **FEW)
    after = [t.config for t in second.session.trials if t.round is None]
    assert len(before) < len(after) == len(set(after)) == 15
    assert set(before) < set(after)

"""What every stage relies on: one measurement a point, checks before anything leads, knowledge that outlives a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.records import Failure
from autotune.search.pace import pace_for
from autotune.search.session import Session
from tests.search.simulated_machine import Fault
from tests.search.simulated_programs import GIB, LANGUAGE_MODEL, SCENARIOS
from tests.search.simulated_search import SimulatedSearch

NewDirectory = Callable[[], Path]
FACTS = SCENARIOS["language model"].facts


@contextmanager
def begun(directory: Path, program: Any = LANGUAGE_MODEL, **options: Any) -> Iterator[tuple[SimulatedSearch, Session]]:
    """A session whose baseline ran."""
    search = SimulatedSearch(program, FACTS, directory, **options)
    with search.begun() as session:
        yield search, session


def test_a_point_is_measured_once(new_directory: NewDirectory) -> None:
    with begun(new_directory()) as (search, session):
        config = search.space.baseline.replace({"precision": "bf16"})
        first = session.measure(config, "compute")
        assert session.measure(config, "explore") is first
        session.measure_again(config, "confirm", confirm_round=0)
        assert session.measured(config) is first
        assert search.machine.asked("measure").count(config) == 2


def test_what_would_lead_is_checked_before_it_does(new_directory: NewDirectory) -> None:
    program = replace(LANGUAGE_MODEL, wrong=({"precision": "bf16"},))
    with begun(new_directory(), program) as (search, session):
        base = search.space.baseline
        wrong = session.measure(base.replace({"precision": "bf16"}), "compute")
        assert wrong.failure is not None
        assert wrong.failure.kind == "numerics"
        assert wrong.measurement is not None, "how fast it was is told"
        assert session.best() == session.baseline_trial()
        also = base.replace({"precision": "bf16", "num_workers": 8})
        assert session.obstacle(also) == "trains differently: the gradient is 40 % off"


def test_one_check_is_enough_for_each_way_to_compute_gradients(new_directory: NewDirectory) -> None:
    with begun(new_directory()) as (search, session):
        base = search.space.baseline
        session.measure(base.replace({"precision": "bf16"}), "compute")
        session.measure(base.replace({"precision": "bf16", "optimizer_impl": "fused"}), "compute")
        assert len(search.machine.asked("parity")) == 1
        session.measure(base.replace({"precision": "bf16", "compile_mode": "default"}), "compute")
        assert len(search.machine.asked("parity")) == 2


def test_a_check_that_cannot_run_says_nothing_of_the_size(new_directory: NewDirectory) -> None:
    program = replace(LANGUAGE_MODEL, faults=(Fault("parity", {"precision": "bf16"}, "device_oom", "build"),))
    with begun(new_directory(), program) as (search, session):
        config = search.space.baseline.replace({"precision": "bf16"})
        trial = session.measure(config, "compute")
        assert trial.failure is not None
        assert trial.failure.message.startswith("it could not be checked: it fails with")
        assert session.obstacles.too_large(config) is None
        assert isinstance(session.parity(config), Failure)


def test_a_size_that_left_no_margin_does_not_fit(new_directory: NewDirectory) -> None:
    # 17 GiB of 18 are reserved: it runs, and leaves less than five per cent.
    limit = int(1.05 * LANGUAGE_MODEL.peak_bytes(SimulatedSearch(LANGUAGE_MODEL, FACTS, Path()).space.baseline) * 1.02)
    with begun(new_directory(), memory_limit_bytes=limit) as (search, session):
        first = session.trials[0]
        assert first.failure is not None
        assert first.failure.kind == "device_oom"
        assert "left less than the margin" in first.failure.message
        assert session.obstacle(search.space.baseline) == "a batch of 32 does not fit with the same memory settings"
        assert session.baseline == search.space.baseline.replace({"batch_size": 16})


def test_what_probes_found_holds_for_trials(new_directory: NewDirectory) -> None:
    with begun(new_directory()) as (search, session):
        answer = session.probe("memory", search.space.baseline.replace({"batch_size": 128}))
        assert answer.failure is not None
        for config in (search.space.baseline.replace({"batch_size": size, "num_workers": 4}) for size in (128, 256)):
            assert session.obstacle(config) == "a batch of 128 does not fit with the same memory settings"
        assert session.obstacle(search.space.baseline.replace({"batch_size": 128, "precision": "bf16"})) is None


def test_everything_learnt_outlives_the_call(new_directory: NewDirectory) -> None:
    directory = new_directory()
    program = replace(LANGUAGE_MODEL, wrong=({"precision": "fp16"},))
    base = SimulatedSearch(program, FACTS, directory).space.baseline
    with begun(directory, program) as (_, session):
        session.probe("memory", base.replace({"batch_size": 128}))
        session.measure(base.replace({"precision": "fp16"}), "compute")
        session.measure(base.replace({"precision": "tf32"}), "compute")
        before = session
    with begun(directory, program, trials=10) as (search, session):
        assert search.machine.requests == []
        assert session.trials == before.trials
        assert session.parity_results == before.parity_results
        assert session.obstacle(base.replace({"batch_size": 128})) is not None
        assert session.obstacle(base.replace({"precision": "fp16", "num_workers": 0})) is not None
        assert session.budget.trials_left == 7
        session.probe("memory", base.replace({"batch_size": 128}))
        session.parity(base.replace({"precision": "tf32"}))
        assert search.machine.requests == []


def test_a_trial_that_fails_later_is_no_candidate(new_directory: NewDirectory) -> None:
    with begun(new_directory()) as (search, session):
        trial = session.measure(search.space.baseline.replace({"precision": "bf16"}), "compute")
        assert session.best() == trial
        session.fail(trial, Failure(kind="crash", phase="soak", message="it died"))
        assert session.best() == session.baseline_trial()
        assert session.study.trials()[trial.number].failure is not None


def test_a_compilation_is_granted_its_time_until_it_is_known(new_directory: NewDirectory) -> None:
    with begun(new_directory()) as (search, session):
        base = search.space.baseline
        compiled = base.replace({"compile_mode": "default"})
        eager = session.expected_seconds(base)
        assert session.expected_seconds(compiled) == eager + 15.0
        trial = session.measure(compiled, "compute")
        assert session.expected_seconds(compiled.replace({"precision": "bf16"})) == trial.seconds
        assert session.expected_seconds(base) == eager


def test_who_hurries_expects_shorter_trials_than_the_first_and_longer_compilations(new_directory: NewDirectory) -> None:
    program = replace(LANGUAGE_MODEL, start_seconds=4.0, block_spread=0.05)
    with begun(new_directory(), program, budget_seconds=45.0) as (search, session):
        base = search.space.baseline
        assert session.pace.hurried
        expected = session.expected_seconds(base)
        assert session.expected_seconds(base.replace({"compile_mode": "default"})) == expected + 30.0
        trial = session.measure(base.replace({"precision": "bf16"}), "compute")
        assert trial.seconds < 1.05 * expected < session.baseline_trial().seconds


def test_what_was_compiled_is_expected_to_be_found_again(new_directory: NewDirectory) -> None:
    program = replace(LANGUAGE_MODEL, cached_share=0.15)
    with begun(new_directory(), program) as (search, session):
        compiled = search.space.baseline.replace({"compile_mode": "default", "precision": "bf16"})
        cold = session.measure(compiled, "compute")
        assert cold.measurement is not None and not cold.measurement.compile_was_cached
        fused = compiled.replace({"optimizer_impl": "fused"})
        expected = session.expected_seconds(fused)
        assert expected == pytest.approx(cold.seconds - 0.85 * cold.measurement.first_step_seconds)
        assert session.measure(fused, "compute").seconds < 1.1 * expected < cold.seconds
        other_batch = fused.replace({"batch_size": 2 * search.space.micro_batch(fused)})
        assert session.expected_seconds(other_batch) > expected
        assert session.expected_seconds(fused.replace({"memory_format": "channels_last"})) > expected


def test_what_a_hang_took_is_not_expected_of_others(new_directory: NewDirectory) -> None:
    program = replace(LANGUAGE_MODEL, faults=(Fault("measure", {"precision": "tf32"}, "timeout"),))
    with begun(new_directory(), program) as (search, session):
        before = session.expected_seconds(search.space.baseline)
        session.measure(search.space.baseline.replace({"precision": "tf32"}), "compute")
        assert session.expected_seconds(search.space.baseline) == before


def test_timeouts_follow_the_users_step_and_no_hang_takes_the_budget(new_directory: NewDirectory) -> None:
    with begun(new_directory(), budget_seconds=600.0) as (search, session):
        eager, compiled = search.space.baseline, search.space.baseline.replace({"compile_mode": "default"})
        session.measure(eager.replace({"precision": "bf16"}), "compute")
        session.measure(compiled, "compute")
        by_config = {request.config: request.timeouts for request in search.machine.requests}
        assert by_config[eager].compile_seconds <= 150
        assert by_config[compiled].compile_seconds == 150
    assert pace_for(60.0).confirm_block_seconds < pace_for(600.0).confirm_block_seconds


def test_what_is_out_of_the_race_is_stopped_and_leads_nothing(new_directory: NewDirectory) -> None:
    with begun(new_directory()) as (search, session):
        base = search.space.baseline
        best = session.measure(base.replace({"precision": "bf16"}), "compute")
        slow = session.measure(base.replace({"precision": "tf32"}), "explore")
        assert slow.measurement is not None and best.measurement is not None
        assert slow.measurement.stopped_early and not best.measurement.stopped_early
        assert session.candidates() == [best, session.baseline_trial()]
        assert base.replace({"precision": "tf32"}) not in [
            answer.config for answer in session.results(unconfirmed=True)._eligible()
        ]
        told = optuna.load_study(
            study_name=session.study.name, storage=f"sqlite:///{search.directory}/study.db"
        ).trials[slow.number]
        assert told.value == pytest.approx(slow.measurement.samples_per_second)


def test_a_race_is_run_against_what_a_stage_judges_by_and_never_by_the_baseline(new_directory: NewDirectory) -> None:
    with begun(new_directory()) as (search, session):
        base = search.space.baseline
        best = session.measure(base.replace({"precision": "bf16"}), "compute")
        session.measure(base.replace({"precision": "tf32"}), "explore")
        session.measure(base.replace({"optimizer_impl": "fused"}), "compute", incumbent=session.baseline_trial())
        session.measure_again(base, "confirm", confirm_round=0)
        asked = [r for r in search.machine.requests if r.kind == "measure"]
        as_it_is = session.baseline_trial()
        assert as_it_is is not None
        races = [(r.rate_to_beat, r.resident_rate_to_beat) for r in asked]
        assert races == [
            (None, None),
            (session.score(as_it_is), None),
            (session.score(best), None),
            (session.score(as_it_is), session.compute_score(as_it_is)),
            (None, None),
        ]


def test_no_trial_races_where_memory_is_the_aim(new_directory: NewDirectory) -> None:
    with begun(new_directory(), objective="memory") as (search, session):
        session.measure(search.space.baseline.replace({"precision": "bf16"}), "compute")
        session.measure(search.space.baseline.replace({"precision": "tf32"}), "explore")
        assert {request.rate_to_beat for request in search.machine.requests} == {None}


@pytest.mark.parametrize(("asked", "limit"), [(None, 139 * GIB), (16 * GIB, 16 * GIB), (500 * GIB, 139 * GIB)])
def test_the_limit_is_the_card_or_less(asked: int | None, limit: int, new_directory: NewDirectory) -> None:
    search = SimulatedSearch(LANGUAGE_MODEL, FACTS, new_directory(), memory_limit_bytes=asked)
    session = search.session()
    session.study.close()
    assert session.memory_limit_bytes() == limit


# --- what is told of the best so far ----------------------------------------------------------------------------------


def test_the_best_so_far_is_what_its_rounds_say_once_it_has_any(new_directory: NewDirectory) -> None:
    with begun(new_directory()) as (search, session):
        config = search.space.baseline.replace({"precision": "bf16"})
        first = session.measure(config, "compute").measurement
        told = session.standing()
        assert told is not None and first is not None
        assert told.samples_per_second == first.samples_per_second
        session.measure_again(search.space.baseline, "confirm", confirm_round=0)
        assert session.standing() == told, "a round that only the baseline has compares nothing"
        session.measure_again(config, "confirm", confirm_round=0)
        confirmed = session.standing()
        answer = session.results().answer(config)
        assert confirmed is not None
        assert (confirmed.samples_per_second, confirmed.speedup) == (answer.samples_per_second, answer.speedup.value)
        assert confirmed.samples_per_second != first.samples_per_second


def test_what_leaves_the_held_batch_is_told_beside_the_best(new_directory: NewDirectory) -> None:
    scenario = SCENARIOS["small model"]
    search = SimulatedSearch(scenario.program, scenario.facts, new_directory())
    with search.begun() as session:
        assert session.standing(free=True) is None
        larger = session.measure(search.space.baseline.replace({"batch_size": 1024}), "explore").measurement
        freer, best = session.standing(free=True), session.standing()
        assert freer is not None and larger is not None and best is not None
        assert freer.samples_per_second == larger.samples_per_second
        assert best.speedup == 1.0 < freer.speedup


def test_a_resumed_search_says_how_many_trials_were_there(new_directory: NewDirectory) -> None:
    directory = new_directory()
    first = SimulatedSearch(LANGUAGE_MODEL, FACTS, directory, trials=4).run().recommendation
    again = SimulatedSearch(LANGUAGE_MODEL, FACTS, directory, trials=6).run().recommendation
    assert first.earlier_trial_count == 0
    assert first.trial_count == 4
    assert again.earlier_trial_count == first.trial_count + first.confirmation_count
    assert again.trial_count == 6

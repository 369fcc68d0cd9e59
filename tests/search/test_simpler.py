"""Of two that rounds do not tell apart the one with fewer changes is the answer, and what saves memory only for nothing is
none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from autotune.config import Value
from autotune.search.answers import Results
from autotune.search.prune import prune
from autotune.search.session import Session
from tests.knobs.search_facts import cpu_facts
from tests.search.simulated_machine import Program
from tests.search.simulated_search import SimulatedSearch
from tests.search.test_recommend import BASELINE, BF16, GIB, HELD, Trials, recommended, started

NewDirectory = Callable[[], Path]
FUSED: dict[str, Value] = {**BF16, "optimizer_impl": "fused"}
RECOMPUTED: dict[str, Value] = {**BF16, "activation_checkpointing": "all"}


def changed(trials: Trials) -> dict[str, Value]:
    return recommended(trials).best.config.changes_from(BASELINE)


# --- ties -------------------------------------------------------------------------------------------------------------


def test_what_two_rounds_do_not_show_is_not_changed_for() -> None:
    """2.5 % more in two rounds is what processes differ by; 5 % more is likely to be more than that."""
    base = [1000, 1005]
    assert changed(started().rounds(BF16, [1600, 1610], base).rounds(FUSED, [1640, 1651], base)) == BF16
    assert changed(started().rounds(BF16, [1600, 1610], base).rounds(FUSED, [1680, 1690], base)) == FUSED


def test_rounds_of_different_calls_are_compared_by_what_each_gained() -> None:
    trials = started().rounds(BF16, [1600, 1610], [1000, 1005]).add(FUSED, 1700)
    for number, (own, base) in enumerate([(1680, 1002), (1675, 999)], 2):
        trials.add({}, base, round=number).add(FUSED, own, round=number)
    assert changed(trials) == BF16


def test_what_enough_rounds_show_is() -> None:
    base = [1000, 1005, 995, 1002]
    trials = started().rounds(BF16, [1600, 1610, 1605, 1598], base).rounds(FUSED, [1670, 1672, 1668, 1671], base)
    assert changed(trials) == FUSED


def test_other_changes_are_no_less_and_win_by_their_rate() -> None:
    base = [1000, 1005]
    other: dict[str, Value] = {"optimizer_impl": "fused", "num_workers": 3}
    assert changed(started().rounds(BF16, [1600, 1610], base).rounds(other, [1670, 1672], base)) == other


# --- memory -----------------------------------------------------------------------------------------------------------


def test_what_only_saves_memory_is_no_answer_where_the_same_without_it_was_not_tried() -> None:
    """The draw was a lucky one: recomputation makes nothing faster."""
    base = [1000, 1005]
    fused: dict[str, Value] = {"optimizer_impl": "fused"}
    assert changed(started().rounds(RECOMPUTED, [1700, 1710], base).rounds(fused, [1500, 1510], base)) == fused
    assert recommended(started().rounds(RECOMPUTED, [1700, 1710], base)).keep


def test_it_is_where_the_same_without_it_does_not_fit() -> None:
    base = [1000, 1005]
    failed = started().add(BF16, None, fails="device_oom").rounds(RECOMPUTED, [1700, 1710], base)
    assert changed(failed) == RECOMPUTED


def test_it_is_where_the_same_without_it_was_slower() -> None:
    base = [1000, 1005]
    slower = started().add(BF16, 1400.0).rounds(RECOMPUTED, [1700, 1710], base)
    assert changed(slower) == RECOMPUTED


def test_what_probes_found_of_the_batch_counts() -> None:
    trials = started().rounds({**RECOMPUTED, "batch_size": 64}, [1700, 1710], [1000, 1005]).made
    config = trials[-1].config
    results = Results(
        trials=trials, baseline=BASELINE, parity_results={}, space=HELD,
        settings=recommended(started()).settings,
    )  # fmt: skip
    assert results.saves_memory_for_nothing(config)
    plain = HELD.memory_class(config.replace({"activation_checkpointing": "as_is"}))
    assert dataclasses.replace(results, misfits={plain: 96}).saves_memory_for_nothing(config)
    assert not dataclasses.replace(results, misfits={plain: 64}).saves_memory_for_nothing(config)


def test_where_memory_is_the_aim_it_needs_no_excuse() -> None:
    trials = started().add({"activation_checkpointing": "all"}, 900.0, peak_bytes=4 * GIB)
    trials.add({}, 1000.0, round=0).add({"activation_checkpointing": "all"}, 900.0, round=0, peak_bytes=4 * GIB)
    assert not recommended(trials, objective="memory").keep


# --- what a draw changes beside what pays -----------------------------------------------------------------------------


def test_changes_of_a_draw_that_do_nothing_are_taken_from_it(new_directory: NewDirectory) -> None:
    program = Program(
        sample_seconds=0.001, load_seconds=1e-6, sample_speedups={("precision", "bf16"): 3.0}, process_spread=0.001,
        block_spread=0.001,
    )  # fmt: skip
    search = SimulatedSearch(program, cpu_facts(global_batch_size=32), new_directory())
    drawn = search.space.baseline.replace({"precision": "bf16", "optimizer_impl": "fused", "num_workers": 2})
    plain = {"precision": "bf16"}
    with search.begun() as session:
        assert prune(session, session.measure(drawn, "explore"), Session.obstacle) == 3, "each change once"
        assert session.measured(search.space.baseline.replace(plain)) is not None
        best = session.results().answer(search.space.baseline.replace(plain))
        assert best.samples_per_second > 2.9 * session.results().answer(search.space.baseline).samples_per_second
        assert prune(session, session.measure(drawn, "explore"), Session.obstacle) == 0, "all of it is known"


def test_a_draw_that_does_not_lead_is_left_as_it_is(new_directory: NewDirectory) -> None:
    program = Program(sample_seconds=0.001, sample_speedups={("precision", "bf16"): 0.4}, process_spread=0.001)
    search = SimulatedSearch(program, cpu_facts(global_batch_size=32), new_directory())
    with search.begun() as session:
        drawn = search.space.baseline.replace({"precision": "bf16", "optimizer_impl": "fused"})
        assert prune(session, session.measure(drawn, "explore"), Session.obstacle) == 0


def test_a_change_that_is_known_to_pay_is_not_taken_away(new_directory: NewDirectory) -> None:
    program = Program(sample_seconds=0.001, sample_speedups={("precision", "bf16"): 3.0}, process_spread=0.001)
    search = SimulatedSearch(program, cpu_facts(global_batch_size=32), new_directory())
    with search.begun() as session:
        session.measure(search.space.baseline.replace(BF16), "compute")
        drawn = search.space.baseline.replace({**BF16, "batch_size": 64})
        assert prune(session, session.measure(drawn, "explore"), Session.obstacle) == 0

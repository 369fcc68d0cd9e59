"""The step's knobs, one after the other, judged without the loader; then the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.search.compute import search_batch, search_compute
from tests.knobs.search_facts import cuda_facts
from tests.search.simulated_machine import Fault, Program
from tests.search.simulated_programs import (
    GIB,
    LANGUAGE_MODEL,
    RESNET_AS_TIMED,
    RESNET_IN_FIVE_MINUTES,
    SCENARIOS,
    SMALL_AS_TIMED,
    SMALL_IN_TWO_MINUTES,
    SMALL_MODEL,
)
from tests.search.simulated_search import SimulatedSearch

NewDirectory = Callable[[], Path]
LANGUAGE_FACTS = SCENARIOS["language model"].facts
FREE = cuda_facts(batch_held=False, batch_size=32, dataset_length=100_000, largest_batch_size=2048)


def descended(program: Program, directory: Path, **options: Any) -> tuple[SimulatedSearch, dict[str, Any], list[Any]]:
    """The search, what leads in the end, and the changes that were measured in their order."""
    search = SimulatedSearch(program, options.pop("facts", LANGUAGE_FACTS), directory, **options)
    with search.begun() as session:
        start = session.baseline_trial()
        assert start is not None
        leader = search_compute(session, start)
        changes = [dict(session.changes(config)) for config in search.machine.asked("measure")[1:]]
        return search, dict(session.changes(leader.config)), changes


def test_what_cures_the_bottleneck_is_tried_first_and_gains_add_up(new_directory: NewDirectory) -> None:
    _, leader, tried = descended(LANGUAGE_MODEL, new_directory())
    assert tried[0] == {"precision": "bf16"}
    assert leader == {
        "precision": "bf16", "compile_mode": "default", "compile_scope": "step", "optimizer_impl": "fused",
    }  # fmt: skip


def test_a_value_is_tried_beside_what_goes_with_it(new_directory: NewDirectory) -> None:
    """The loss in the compiled graph from the start: one cold compilation less than the model first."""
    _, leader, tried = descended(LANGUAGE_MODEL, new_directory(), only=("compile_mode", "compile_scope"))
    assert leader == {"compile_mode": "default", "compile_scope": "step"}
    assert tried == [leader]


def test_what_does_not_run_with_its_companions_is_tried_alone(new_directory: NewDirectory) -> None:
    program = replace(LANGUAGE_MODEL, faults=(Fault("measure", {"compile_scope": "step"}, "compile_error"),))
    _, leader, tried = descended(program, new_directory(), only=("compile_mode", "compile_scope"))
    assert tried[:2] == [{"compile_mode": "default", "compile_scope": "step"}, {"compile_mode": "default"}]
    assert leader == {"compile_mode": "default"}


def test_what_runs_with_its_companions_and_gains_nothing_is_not_tried_alone(new_directory: NewDirectory) -> None:
    program = Program(sample_seconds=0.001, sample_speedups={("compile_mode", "default"): 0.9})
    _, leader, tried = descended(program, new_directory(), only=("compile_mode", "compile_scope"))
    assert leader == {}
    assert {"compile_mode": "default"} not in tried


def test_companions_are_left_alone_where_they_may_not_move(new_directory: NewDirectory) -> None:
    _, leader, tried = descended(LANGUAGE_MODEL, new_directory(), only=("compile_mode",))
    assert tried[0] == leader == {"compile_mode": "default"}


@pytest.mark.parametrize(("update_seconds", "is_tried"), [(0.0005, False), (0.01, True)])
def test_no_implementation_of_the_update_is_tried_where_it_takes_next_to_nothing(
    update_seconds: float, is_tried: bool, new_directory: NewDirectory
) -> None:
    program = Program(sample_seconds=0.002, update_seconds=update_seconds)
    search = SimulatedSearch(program, LANGUAGE_FACTS, new_directory(), only=("optimizer_impl", "precision"))
    with search.begun() as session:
        start = session.baseline_trial()
        assert start is not None
        search_compute(session, start)
        tried = [session.changes(config) for config in search.machine.asked("measure")]
        assert any("optimizer_impl" in changes for changes in tried) == is_tried
        told = session.skipped.get("optimizer_impl")
        assert told == (
            None
            if is_tried
            else "optimizer_impl: the optimizer's update takes 1 % of a step, and no more can be gained"
        )


@pytest.mark.parametrize("gains", [True, False])
def test_whether_another_update_pays_is_told_by_what_it_takes_not_by_rates(
    gains: bool, new_directory: NewDirectory
) -> None:
    """It gains 6 % of the step, or nothing, and from process to process the rate differs by as much."""
    program = Program(
        sample_seconds=0.001, update_seconds=0.0035, process_spread=0.05,
        update_speedups={("optimizer_impl", "fused"): 2.5 if gains else 1.0},
    )  # fmt: skip
    rates_agree = set()
    for seed in range(6):
        search, leader, _ = descended(program, new_directory(), only=("optimizer_impl",), seed=seed)
        assert (leader.get("optimizer_impl") == "fused") == gains
        own, fused = (answer.measurement for answer in search.machine.answers[:2])
        assert own is not None and fused is not None
        rates_agree.add((fused.samples_per_second >= 1.02 * own.samples_per_second) == gains)
    assert rates_agree == {True, False}, "the rates alone would have told that"


def test_a_shorter_update_is_not_taken_beside_a_step_that_is_slower(new_directory: NewDirectory) -> None:
    program = Program(
        sample_seconds=0.001, update_seconds=0.007,
        update_speedups={("optimizer_impl", "fused"): 2.5}, sample_speedups={("optimizer_impl", "fused"): 0.7},
    )  # fmt: skip
    _, leader, tried = descended(program, new_directory(), only=("optimizer_impl",))
    assert {"optimizer_impl": "fused"} in tried
    assert leader == {}


def test_recomputation_is_not_tried_for_speed(new_directory: NewDirectory) -> None:
    _, _, tried = descended(LANGUAGE_MODEL, new_directory())
    assert not any("activation_checkpointing" in changes for changes in tried)


def test_recomputation_is_tried_where_memory_is_the_aim(new_directory: NewDirectory) -> None:
    _, leader, _ = descended(LANGUAGE_MODEL, new_directory(), objective="memory")
    assert "activation_checkpointing" in leader


def test_where_kernels_are_slow_to_start_graphs_are_tried_beside_compiling(new_directory: NewDirectory) -> None:
    _, leader, tried = descended(SMALL_MODEL, new_directory(), facts=FREE)
    assert leader["compile_mode"] == "reduce-overhead"
    assert len(tried) < 10


def test_graphs_come_before_compiling_alone_and_nothing_that_only_computes_faster(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(SMALL_AS_TIMED, SMALL_IN_TWO_MINUTES.facts, new_directory())
    with search.begun() as session:
        start = session.baseline_trial()
        assert start is not None
        leader = search_compute(session, start)
        assert session.changes(leader.config) == {
            "optimizer_impl": "fused", "compile_mode": "reduce-overhead", "compile_scope": "step", "num_workers": 1,
        }  # fmt: skip
        tried = search.machine.asked("measure")
        assert all(config["compile_mode"] != "default" and config["precision"] == "as_is" for config in tried)
        assert session.skipped["precision"] == (
            "precision: the device waits for its next kernel, and nothing is gained by computing faster"
        )


@pytest.mark.parametrize(
    "hinders",
    [
        {"faults": (Fault("measure", {"compile_mode": "reduce-overhead"}, "cuda_error"),)},
        {"wrong": ({"compile_mode": "reduce-overhead"},)},
        {"launch_speedups": {("compile_mode", "default"): 2.0}},
    ],
    ids=["graphs fail", "graphs train differently", "graphs gain nothing"],
)
def test_compiling_alone_follows_where_graphs_do_not_help(hinders: Any, new_directory: NewDirectory) -> None:
    program = replace(SMALL_AS_TIMED, process_spread=0.005, block_spread=0.005, **hinders)
    if "launch_speedups" not in hinders:
        program = replace(program, launch_speedups={**program.launch_speedups, ("compile_mode", "default"): 2.0})
    _, leader, tried = descended(program, new_directory(), facts=SMALL_IN_TWO_MINUTES.facts)
    modes = list(dict.fromkeys(changes["compile_mode"] for changes in tried if "compile_mode" in changes))
    assert modes == ["reduce-overhead", "default"]
    assert leader["compile_mode"] == "default"


def test_what_only_computes_faster_is_tried_once_the_device_is_busy(new_directory: NewDirectory) -> None:
    """Graphs make the step so fast that what the device computes is what is left of it."""
    program = replace(SMALL_AS_TIMED, sample_seconds=7e-5, process_spread=0.005, block_spread=0.005)
    _, leader, tried = descended(program, new_directory(), facts=SMALL_IN_TWO_MINUTES.facts)
    assert "precision" in leader
    first = next(at for at, changes in enumerate(tried) if "precision" in changes)
    assert all(changes.get("compile_mode") == "reduce-overhead" for changes in tried[first:])


RESNET = replace(
    RESNET_AS_TIMED, process_spread=0.005, block_spread=0.005,
    launch_speedups={**RESNET_AS_TIMED.launch_speedups, ("memory_format", "channels_last"): 0.8},
)  # fmt: skip
HIDDEN = {"memory_format": "channels_last", "compile_mode": "reduce-overhead", "compile_scope": "step"}


def test_what_only_the_starting_of_kernels_hides_is_tried_with_its_cure(new_directory: NewDirectory) -> None:
    """In bf16 the device is busy and channels last gains nothing, since the host is no faster; with graphs it does."""
    _, leader, tried = descended(RESNET, new_directory(), facts=RESNET_IN_FIVE_MINUTES.facts)
    assert leader.items() >= HIDDEN.items()
    eager = next(at for at, changes in enumerate(tried) if changes.get("memory_format") == "channels_last")
    assert tried[eager].get("compile_mode") is None and tried[eager + 1].items() >= HIDDEN.items()


@pytest.mark.parametrize(
    "changed",
    [
        {"launch_seconds": 0.001},
        {"sample_speedups": {**RESNET.sample_speedups, ("memory_format", "channels_last"): 0.8}},
        {"launch_speedups": {**RESNET.launch_speedups, ("memory_format", "channels_last"): 0.5}},
    ],
    ids=["the device stays busy", "the device is slower", "the host is much slower"],
)
def test_what_gains_nothing_for_another_reason_is_not(changed: dict[str, Any], new_directory: NewDirectory) -> None:
    program = replace(RESNET, sample_speedups={("precision", "bf16"): 1.1, ("memory_format", "channels_last"): 1.01})
    _, _, tried = descended(replace(program, **changed), new_directory(), facts=RESNET_IN_FIVE_MINUTES.facts)
    eager = next(at for at, changes in enumerate(tried) if changes.get("memory_format") == "channels_last")
    assert not any(changes.items() >= HIDDEN.items() for changes in tried[eager + 1 : eager + 2])


def test_where_the_device_waits_anyway_nothing_is_hidden(new_directory: NewDirectory) -> None:
    program = replace(SMALL_AS_TIMED, update_speedups={("optimizer_impl", "fused"): 1.0})
    _, _, tried = descended(program, new_directory(), facts=SMALL_IN_TWO_MINUTES.facts)
    assert tried[0] == {"optimizer_impl": "fused"}
    assert tried[1] == {"compile_mode": "reduce-overhead", "compile_scope": "step"}


def test_what_its_cure_does_not_make_better_changes_nothing(new_directory: NewDirectory) -> None:
    program = replace(RESNET, faults=(Fault("measure", {"compile_mode": "reduce-overhead"}, "cuda_error"),))
    program = replace(
        program, sample_speedups={**program.sample_speedups, ("cudnn_benchmark", "on"): 1.8},
        launch_speedups={**program.launch_speedups, ("cudnn_benchmark", "on"): 0.8},
    )  # fmt: skip
    _, leader, tried = descended(program, new_directory(), facts=RESNET_IN_FIVE_MINUTES.facts)
    assert any(changes.items() >= HIDDEN.items() for changes in tried)
    hidden_too = [changes.get("compile_mode") for changes in tried if changes.get("cudnn_benchmark") == "on"]
    assert hidden_too == [None], "it is not compiled as well"
    assert "memory_format" not in leader and leader["precision"] == "bf16"


def test_its_cure_waits_where_nothing_is_to_be_compiled_yet(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(RESNET, RESNET_IN_FIVE_MINUTES.facts, new_directory())
    with search.begun() as session:
        start = session.baseline_trial()
        assert start is not None
        search_compute(session, start, quick_only=True)
        tried = search.machine.asked("measure")
        assert any(config["memory_format"] == "channels_last" for config in tried)
        assert all(config["compile_mode"] == "as_is" for config in tried)


def test_an_update_that_gained_too_little_to_be_seen_is_tried_again_in_a_faster_step(
    new_directory: NewDirectory,
) -> None:
    """3 % of the user's step, 15 % of that with graphs."""
    program = replace(
        SMALL_AS_TIMED, update_seconds=0.0005, update_speedups={("optimizer_impl", "fused"): 2.0},
        load_seconds=1e-7, process_spread=0.001, block_spread=0.001,
    )  # fmt: skip
    _, leader, tried = descended(program, new_directory(), facts=SMALL_IN_TWO_MINUTES.facts)
    assert tried[0] == {"optimizer_impl": "fused"}
    assert leader["optimizer_impl"] == "fused"


def test_before_anything_is_compiled_what_is_quick_is_moved(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(SMALL_AS_TIMED, SMALL_IN_TWO_MINUTES.facts, new_directory())
    with search.begun() as session:
        start = session.baseline_trial()
        assert start is not None
        leader = search_compute(session, start, quick_only=True)
        assert session.changes(leader.config) == {"optimizer_impl": "fused"}
        assert all(config["compile_mode"] == "as_is" for config in search.machine.asked("measure"))


def test_a_slow_loader_hides_no_gain_of_the_step(new_directory: NewDirectory) -> None:
    """End to end every configuration gives 200 samples a second; only without the loader is bf16 seen to be faster."""
    program = Program(sample_seconds=0.001, load_seconds=0.005, sample_speedups={("precision", "bf16"): 3.0})
    facts = cuda_facts(global_batch_size=32, num_workers=1, workers_fixed_reason="it does not shard")
    _, leader, _ = descended(program, new_directory(), facts=facts)
    assert leader["precision"] == "bf16"


def grown(
    program: Program, directory: Path, *, free: bool = True, **options: Any
) -> tuple[SimulatedSearch, list[int], int]:
    """The search, the sizes that were run, and the one that leads."""
    search = SimulatedSearch(program, options.pop("facts", FREE), directory, **options)
    with search.begun() as session:
        start = session.baseline_trial()
        assert start is not None
        leader = search_batch(session, start, "compute", free=free)
        sizes = [search.space.micro_batch(config) for config in search.machine.asked("measure")[1:]]
        return search, sizes, search.space.micro_batch(leader.config)


def test_the_batch_is_doubled_until_that_is_not_worthwhile(new_directory: NewDirectory) -> None:
    program = Program(sample_seconds=0.001, launch_seconds=0.1, process_spread=0.001, block_spread=0.001)
    _, sizes, best = grown(program, new_directory())
    assert sizes == [512, 128]
    assert best == 128, "what 512 gained, 128 can have"


def test_a_leap_over_the_end_of_the_gain_is_taken_back(new_directory: NewDirectory) -> None:
    """From 64 on the device is busy, and eight times as much gives no more. Where the leap may not fit it is not taken."""
    program = Program(sample_seconds=0.001, launch_seconds=0.064, process_spread=0.001, block_spread=0.001)
    _, sizes, best = grown(program, new_directory())
    assert (sizes, best) == ([512, 64], 64)
    _, sizes, best = grown(replace(program, constant_bytes=10 * GIB), new_directory())
    assert (sizes, best) == ([64, 128], 64)


def test_a_doubling_that_does_not_fit_is_halved(new_directory: NewDirectory) -> None:
    program = Program(sample_seconds=1e-5, launch_seconds=0.1, sample_bytes=GIB // 8, constant_bytes=GIB)
    search, sizes, best = grown(program, new_directory(), memory_limit_bytes=30 * GIB)
    assert sizes == [64, 128, 256, 192]
    assert best == 192
    assert search.machine.usable(search.space.baseline.replace({"batch_size": best}), 30 * GIB)


def test_a_held_batch_is_not_exceeded(new_directory: NewDirectory) -> None:
    program = Program(sample_seconds=1e-5, launch_seconds=0.1)
    facts = cuda_facts(global_batch_size=128, batch_size=32, dataset_length=10_000, largest_batch_size=2048)
    _, sizes, best = grown(program, new_directory(), facts=facts, free=False)
    assert sizes == [128]
    assert best == 128
    _, sizes, _ = grown(program, new_directory(), facts=facts, free=True)
    assert max(sizes) > 128


def test_for_less_memory_the_micro_batch_is_halved(new_directory: NewDirectory) -> None:
    facts = cuda_facts(global_batch_size=32, batch_size=32)
    _, sizes, best = grown(LANGUAGE_MODEL, new_directory(), facts=facts, free=False, objective="memory")
    assert sizes == [16, 8, 4, 2, 1]
    assert best == 1

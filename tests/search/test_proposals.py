"""The sampler proposes points of the space that are worth running, none of them twice."""

from __future__ import annotations

import random
from typing import Any

from autotune.config import TrainingConfig
from autotune.search.proposals import Proposals
from tests.search.test_study import quick_space, trial


def made(**changes: Any) -> Proposals:
    arguments: dict[str, Any] = {"space": quick_space(), "objective": "throughput", "sampler": "tpe", "seed": 0}
    return Proposals(**{**arguments, **changes})


def invented_rate(config: TrainingConfig) -> float:
    """Large batches, bf16 and fused steps are fast, and two workers are best."""
    precision = {"as_is": 1.0, "tf32": 2.0, "bf16": 4.0, "fp16": 3.5}[str(config["precision"])]
    batch = int(config["batch_size"]) / (8 + int(config["batch_size"]))
    implementation = 1.2 if config["optimizer_impl"] == "fused" else 1.0
    return 100 * precision * batch * implementation / (1 + 0.1 * abs(int(config["num_workers"]) - 2))


def learn(proposals: Proposals, config: TrainingConfig) -> None:
    proposals.learn([trial(config, rate=invented_rate(config))])


def explore(proposals: Proposals, count: int) -> list[TrainingConfig]:
    """What is drawn where all of it is measured."""
    drawn = []
    for _ in range(count):
        drawn.append(proposals.draw())
        learn(proposals, drawn[-1])
    return drawn


def test_proposals_are_points_of_the_space_and_none_comes_twice() -> None:
    space = quick_space()
    proposals = made()
    learn(proposals, space.baseline)
    drawn = explore(proposals, 40)
    assert all(config[name] in values for config in drawn for name, values in space.choices.items())
    assert len({space.baseline, *drawn}) == 41


def test_the_sampler_learns() -> None:
    space = quick_space()
    dice = random.Random(0)
    guessed: list[float] = []
    learned: list[float] = []
    for seed in range(2):
        proposals = made(seed=seed)
        explore(proposals, 20)
        for _ in range(30):
            learned.append(invented_rate(proposals.draw()))
        for _ in range(200):
            point = {name: dice.choice(values) for name, values in space.choices.items()}
            guessed.append(invented_rate(TrainingConfig(point)))
    assert sum(learned) / len(learned) > 1.3 * sum(guessed) / len(guessed)


def test_refused_points_are_avoided() -> None:
    proposals = made()
    explore(proposals, 12)
    refused = set()
    for _ in range(20):
        config = proposals.draw()
        assert config not in refused
        refused.add(config)
        proposals.refuse(config, "it does not fit")
    assert proposals.draw() not in refused


def test_a_point_that_was_never_drawn_can_be_refused() -> None:
    space = quick_space(only=("precision",))
    proposals = made(space=space)
    refused, *left = (space.start.replace({"precision": value}) for value in space.choices["precision"])
    proposals.refuse(refused, "it does not fit")
    assert set(explore(proposals, len(left))) == set(left)


def test_what_is_forgotten_is_drawn_again_and_what_was_refused_is_not() -> None:
    space = quick_space(only=("precision",))
    proposals = made(space=space)
    measured, refused, *left = (space.start.replace({"precision": value}) for value in space.choices["precision"])
    learn(proposals, measured)
    proposals.refuse(refused, "it does not fit")
    proposals.refuse(measured, "known already, so that this says nothing")
    assert proposals.knows(measured) and proposals.knows(refused)
    proposals.forget()
    assert set(explore(proposals, 1 + len(left))) == {measured, *left}


def test_what_runs_out_of_memory_is_kept_away_from() -> None:
    failures = 0
    proposals = made()
    for number in range(30):
        config = proposals.draw()
        too_large = int(config["batch_size"]) > 16
        failures += too_large and number >= 15
        if too_large:
            proposals.learn([trial(config, kind="device_oom")])
        else:
            learn(proposals, config)
    offered = quick_space().batch_sizes
    blind = sum(size > 16 for size in offered) / len(offered)
    assert failures < 0.7 * blind * 15


def test_a_space_that_is_used_up_repeats_itself() -> None:
    space = quick_space(only=("precision",))
    proposals = made(space=space)
    drawn = explore(proposals, len(space.choices["precision"]))
    assert {config["precision"] for config in drawn} == set(space.choices["precision"])
    assert proposals.draw() in drawn


def test_fixed_values_are_kept() -> None:
    space = quick_space(fixed={"batch_size": 16, "precision": "bf16"})
    proposals = made(space=space)
    learn(proposals, space.baseline)
    drawn = explore(proposals, 15)
    assert {(config["batch_size"], config["precision"]) for config in drawn} == {(16, "bf16")}


def test_with_nothing_to_vary_the_start_is_proposed() -> None:
    space = quick_space(fixed=dict(quick_space().baseline))
    proposals = made(space=space)
    assert explore(proposals, 2) == [space.start, space.start]


def test_the_same_seed_proposes_the_same() -> None:
    first, second, other = (explore(made(seed=seed), 14) for seed in (7, 7, 8))
    assert first == second != other

"""`Proposals`: the sampler that proposes further points, and what it has learnt of those that ran or cannot.

They are drawn from a study in memory, beside the one on disk, that holds the same trials over the knobs that vary: a
proposal that is refused teaches the sampler there, and leaves no trial behind.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from autotune.config import TrainingConfig, Value
from autotune.options import Objective
from autotune.records import Strategy, Trial
from autotune.space import SearchSpace

SAMPLER_DRAWS = 8
"""For one proposal, before it is taken at random: a sampler that is sure of its region draws what is known by then, and each
draw takes milliseconds."""
RANDOM_DRAWS = 64
"""For one proposal, before nothing new is proposed."""

Sampler = Literal["tpe", "gp", "random"]
"""Which of Optuna's samplers proposes points."""


class Proposals:
    """The sampler's own study, in memory: the varied knobs only, refused points included."""

    def __init__(self, space: SearchSpace, objective: Objective, sampler: Sampler, seed: int) -> None:
        self._space = space
        self._objective = objective
        self._random = random.Random(seed)
        self._sampler = _made_sampler(sampler, seed)
        self._learns_pruned = sampler != "gp"
        # A Gaussian process proposes the same again until it learns something; what it draws takes a second.
        self._sampler_draws = 1 if sampler == "gp" else SAMPLER_DRAWS
        everything = distributions(space, space.start)
        self._distributions = {name: everything[name] for name in space.varied}
        self._measured: set[str] = set()
        self._refused: dict[str, TrainingConfig] = {}
        self.forget()

    def forget(self) -> None:
        """Drops what was measured; what was refused stays refused."""
        with quiet_optuna():
            self._study = optuna.create_study(direction="maximize", sampler=self._sampler)
        self._measured.clear()
        for config in self._refused.values():
            self._add(config, None)

    def learn(self, trials: Sequence[Trial]) -> None:
        """Adds measured points, except outside the space (the baseline, where something else is fixed)."""
        fixed = {name: values[0] for name, values in self._space.choices.items() if len(values) == 1}
        for trial in trials:
            self._measured.add(trial.config.key)
            if all(trial.config[name] == value for name, value in fixed.items()):
                self._add(trial.config, objective_value(trial, self._objective) if trial.failure is None else None)

    def draw(self) -> TrainingConfig:
        """A point that is neither measured nor refused; at random where the sampler finds none in many draws."""
        if not self._distributions:
            return self._space.start
        asked = self._study.ask()  # from here on the sampler sees what was learnt since
        trial = self._study.get_trials(deepcopy=False)[asked.number]
        for attempt in range(self._sampler_draws + RANDOM_DRAWS):
            config = self._sample(trial) if attempt < self._sampler_draws else self._at_random()
            if not self.knows(config):
                break
        # Not run as it is: what runs is added under its own values, which may be rounded to the choices.
        self._study.tell(asked, state=TrialState.FAIL)
        return config

    def knows(self, config: TrainingConfig) -> bool:
        """Whether the point was measured or refused."""
        return config.key in self._measured or config.key in self._refused

    def refuse(self, config: TrainingConfig, reason: str) -> None:
        """Adds a point of the space, drawn or not, as one that cannot run, unless it is known already."""
        if not self.knows(config):
            self._refused[config.key] = config
            self._add(config, None, reason)

    def _add(self, config: TrainingConfig, value: float | None, reason: str = "") -> None:
        """A point with its value, or one that did not or cannot run: whatever the reason, not worth another try."""
        failed = value is None
        pruned = failed and self._learns_pruned
        self._study.add_trial(
            optuna.trial.create_trial(
                params={name: config[name] for name in self._distributions},
                distributions=self._distributions,
                value=self._middling() if failed and not pruned else value,
                state=TrialState.PRUNED if pruned else TrialState.COMPLETE,
                constraints={"runs": 1.0 if failed else -1.0},
                user_attrs={"not_run": reason} if reason else {},
            )
        )

    def _middling(self) -> float:
        """What a point that did not run counts as where a sampler wants a value: the median, so that only its constraint
        speaks against it (a Gaussian process does not see pruned trials)."""
        seen = [trial.value for trial in self._study.get_trials(deepcopy=False) if trial.value is not None]
        return statistics.median(seen) if seen else 0.0

    def _sample(self, trial: optuna.trial.FrozenTrial) -> TrainingConfig:
        # As `ask` does it, but leaving no trial behind for each draw: a draw takes the longer the more there are.
        sampler, study = self._sampler, self._study
        drawn = sampler.sample_relative(study, trial, self._distributions)
        for name, distribution in self._distributions.items():
            if name not in drawn:
                drawn[name] = sampler.sample_independent(study, trial, name, distribution)
        return self._space.start.replace({name: self._choice(name, drawn[name]) for name in self._distributions})

    def _at_random(self) -> TrainingConfig:
        choices = self._space.choices
        return self._space.start.replace({name: self._random.choice(choices[name]) for name in self._distributions})

    def _choice(self, name: str, drawn: Value) -> Value:
        """The choice that was drawn, or for a number the nearest one, by ratio."""
        choices = self._space.choices[name]
        if drawn in choices:
            return drawn
        return min(choices, key=lambda value: abs(math.log1p(int(value)) - math.log1p(int(drawn))))


def sampler_of(strategy: Strategy) -> Sampler:
    """The sampler that a strategy asks for; where it names none, the one that explores after the stages."""
    return strategy if strategy in ("gp", "random") else "tpe"


def _made_sampler(name: Sampler, seed: int) -> optuna.samplers.BaseSampler:
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "gp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    # Plain multivariate TPE is enough here: `group` is for trials that lack some of the parameters.
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=False)


def distributions(space: SearchSpace, config: TrainingConfig) -> dict[str, BaseDistribution]:
    """The same for every trial of a study, as Optuna demands; numbers as a range, since a ceiling is off the grid."""
    return {name: _distribution(space, name, config[name]) for name in space.choices}


def _distribution(space: SearchSpace, name: str, value: Value) -> BaseDistribution:
    values = list(dict.fromkeys([*space.choices[name], space.baseline[name]]))
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
        return CategoricalDistribution(values)
    numbers = [int(one) for one in values]
    if name == space.batch_name:
        return IntDistribution(1, max(*numbers, space.facts.largest_batch_size, int(value)), log=True)
    return IntDistribution(min(0, *numbers), max(1, int(value), *numbers))


def objective_value(trial: Trial, objective: Objective) -> float:
    """What Optuna maximises: samples per second, or minus the peak bytes."""
    assert trial.measurement is not None
    if objective == "memory":
        return -float(trial.measurement.memory.peak_allocated_bytes)
    return trial.measurement.samples_per_second


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna's own log lines say nothing to a user of autotune; the level is put back, for the user may use it too."""
    logger = logging.getLogger("optuna")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)

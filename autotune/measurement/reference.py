"""`Reference`: the user's program in fp32, eager, always from the same weights: what a configuration is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from autotune.config import TrainingConfig
from autotune.measurement.determinism import (
    HIGHEST,
    DropoutSeen,
    Precision,
    batch_norms_evaluated,
    dropout_off,
    eager,
    outputs_rounded,
    round_to,
    shaken,
    types_watched,
)
from autotune.measurement.runs import (
    Difference,
    Place,
    Run,
    State,
    Step,
    differences,
    kept,
    restore,
    run_one_step,
    run_steps,
    run_windows,
    state,
)
from autotune.measurement.seeds import Means, run_seeds
from autotune.records import Conditions
from autotune.surgery.batches import map_tensors
from autotune.surgery.generators import seed_everything
from autotune.training.training import Training
from autotune.training.windows import MicroBatch, Window
from autotune.workload import UserFunctions

SAME_AGAIN = 1e-5
"""Two runs of a program that keeps no state differ by less; a GPU may add in another order."""

T = TypeVar("T")


class Reference:
    """Runs the user's program, at its own batch, as often as is asked; every run starts from the weights of the first.

    Dropout is always off. What runs leave behind is kept in `place`. `config`: values without which the program fits at
    no batch, with the `blocks` that they may recompute; else nothing is changed.
    """

    def __init__(
        self,
        functions: UserFunctions,
        conditions: Conditions,
        place: Place,
        config: TrainingConfig,
        blocks: tuple[str, ...],
    ) -> None:
        self._functions, self._config, self._blocks = functions, config, blocks
        self._conditions = conditions.model_copy(update={"global_batch_size": None})
        self._place = place
        self._latest: Training | None = None
        self._is_stateless = False
        self._reusable: Training | None = None
        self._dropout = DropoutSeen()
        self._states: list[tuple[Window, State]] = []
        """Windows of the latest `run`, each with the state before it; without the first, which `weights` are before."""
        self.weights = State({}, {})
        """What every run starts from; empty before the first."""
        self.has_dropout = False
        """Whether the program drops anything, as its latest `run` showed."""
        self.own_types: frozenset[str] = frozenset()
        """Types below fp32 that the program computes in by itself: it has an autocast of its own, or such parameters."""

    # --- runs ---

    def run(self, windows: list[Window]) -> Run:
        """All windows in turn, with their updates."""

        def run(training: Training) -> Run:
            with types_watched(training.model) as seen:
                found = run_windows(training, windows, 1, self._place)
            self.own_types = frozenset(seen)
            return found

        found = self._with_training(run, updates=True)
        self._states = list(zip(windows[1:], found.states, strict=True))
        self.has_dropout = self._dropout.ran or (self._dropout.held and (bool(found.drew) or self._draws(windows[0])))
        return found

    def step(self, window: Window, *, seed: int = 1, evaluated_norms: bool = False) -> Step:
        """One window and no update; on demand with BatchNorm in evaluation."""
        return self._with_training(
            lambda training: _one_step(training, window, seed, self._place), evaluated_norms=evaluated_norms
        )

    @property
    def returns_weight(self) -> bool:
        """Whether its loss came as (loss_sum, weight) in the latest run."""
        return self._latest is not None and self._latest.last_weight is not None

    def means(self, window: Window, *, evaluated_norms: bool = False) -> Means:
        """One window, by its means over several seeds."""
        return self._with_training(
            lambda training: run_seeds(training, self.weights, window, self._place),
            evaluated_norms=evaluated_norms,
        )

    def inexact(
        self,
        windows: list[Window],
        teacher: Sequence[Step],
        numbers: Sequence[int],
        *,
        precision: Precision = HIGHEST,
        rounding: str | None = None,
        outputs: str | None = None,
        evaluated_norms: bool = False,
        anew: bool = False,
    ) -> dict[int, Difference]:
        """How far the user's program is from its own steps, the teacher, where it is computed in less than fp32: in these
        of the windows (counted from 0), and in those that had to run as well. `anew`: by another model of `model_fn`'s.

        `rounding` and `outputs`: the types that weights and inputs, and what modules return, are rounded to. Where that is
        fp32, or the program computes in such a type by itself, weights and inputs are moved as far as that rounds.
        Weights are rounded anew in every step, as autocast does: the small updates of a training's first steps are lost
        to it, in most weights the same way.
        """

        def inexact(tensor: torch.Tensor) -> torch.Tensor:
            assert rounding is not None
            is_rounded = rounding == "float32" or rounding in self.own_types
            return (shaken if is_rounded else round_to)(tensor, rounding)

        weights = None if rounding is None else inexact

        def given(window: Window) -> Window:
            return window if rounding is None else _changed(window, inexact)

        def in_turn(training: Training) -> dict[int, Difference]:
            first = list(map(given, windows[: max(numbers) + 1]))
            return dict(enumerate(differences(teacher, run_steps(training, first, 1, teacher, weights))))

        def one_by_one(training: Training) -> dict[int, Difference]:
            found = {}
            for number in numbers:
                steps = run_one_step(training, number, given(windows[number]), 1, starts[number], weights)
                (found[number],) = differences([teacher[number]], steps)
            return found

        starts = {} if anew else self._states_before(windows, numbers)
        run = one_by_one if starts else in_turn

        def watched(training: Training) -> dict[int, Difference]:
            with outputs_rounded(training.model, outputs) if outputs else nullcontext():
                return run(training)

        updates = anew or (not starts and max(numbers) > 0)
        return self._with_training(watched, precision=precision, evaluated_norms=evaluated_norms, updates=updates)

    def _states_before(self, windows: list[Window], numbers: Sequence[int]) -> dict[int, State]:
        """What these windows start from; empty where one is not known, or the program keeps more than that."""
        if not self._is_stateless or len(self._states) < max(numbers):
            return {}
        known = [(windows[0], self.weights), *self._states]
        if any(windows[number] is not known[number][0] for number in numbers):
            return {}
        return {number: known[number][1] for number in numbers}

    # --- the training that runs ---

    def reuse_if_stateless(self, run: Run, windows: list[Window]) -> None:
        """Runs of one window share a training from now on, where one gives the gradients of the last `run` again.

        A model may count its calls and behave by the count; most do not, and building one takes seconds. One whose
        buffers come or grow while it runs takes the first weights no more.
        """
        assert self._latest is not None
        if _shapes(self._latest.model.state_dict()) != _shapes(self.weights.held):
            return
        self._reusable = self._latest

        def error(training: Training) -> float:
            (again,) = differences(run.steps, run_steps(training, windows[:1], 1))
            return again.gradients.relative_error

        self._is_stateless = self._with_training(error) <= SAME_AGAIN
        if not self._is_stateless:
            self._reusable = None

    def let_go(self) -> None:
        """Keeps no training any more: somebody else needs the memory."""
        self._latest = self._reusable = None

    def _draws(self, window: Window) -> bool:
        """Whether the latest training draws random numbers where its dropout is left as it is."""
        assert self._latest is not None
        with HIGHEST.applied(), eager():
            return any(step.drew for step in run_steps(self._latest, [window], 1))

    def _with_training(
        self,
        run: Callable[[Training], T],
        *,
        precision: Precision = HIGHEST,
        evaluated_norms: bool = False,
        updates: bool = False,
    ) -> T:
        with self._training(precision, evaluated_norms, updates) as training:
            self._latest = training
            return run(training)

    @contextmanager
    def _training(self, precision: Precision, evaluated_norms: bool, updates: bool) -> Iterator[Training]:
        """At the first run's weights; built anew for updates, and where it may keep more than weights."""
        training = self._reusable
        if training is None or updates:
            self.let_go()
            training = self._built()
            if self._is_stateless and not updates:
                self._reusable = training
        if self.weights.held or self.weights.beside:
            restore(training, self.weights)
        else:
            self.weights = state(training, self._place)
        norms = batch_norms_evaluated(training.model) if evaluated_norms else nullcontext()
        with precision.applied(), eager(), norms, dropout_off(training.model, self._dropout):
            yield training

    def _built(self) -> Training:
        seed_everything(0)
        return Training(self._functions, self._config, self._conditions, blocks=self._blocks)


def _one_step(training: Training, window: Window, seed: int, place: Place) -> Step:
    (step,) = (kept(step, place) for step in run_steps(training, [window], seed))
    return step


def _shapes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in values.items()}


def _changed(window: Window, function: Callable[[torch.Tensor], torch.Tensor]) -> Window:
    return [MicroBatch(item.samples, map_tensors(item.data, function)) for item in window]

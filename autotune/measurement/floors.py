"""`Floors`: what a candidate may differ by, from runs of the user's own program whose error is no fault."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autotune.config import TrainingConfig
from autotune.knobs.registry import KNOBS
from autotune.measurement.determinism import HIGHEST, Precision
from autotune.measurement.gradients import first_not_finite
from autotune.measurement.reference import SAME_AGAIN, Reference
from autotune.measurement.runs import Difference, Step
from autotune.measurement.verdict import Allowance, allowance, fault, wider
from autotune.records import Conditions
from autotune.surgery.out_of_memory import is_out_of_memory
from autotune.training.windows import Window

MOST_DEPTH = 2
"""Floors from so many kinds of runs beside the first. Outputs are rounded twice, for how far a small tensor is off is
chance, and one throw of the dice says little."""
LARGEST_REPEAT = 0.1
"""A program that differs from itself by more, run twice on the same samples, cannot tell right from wrong."""


class Floors:
    """Asks the reference for what the candidate, of this configuration, is held to. What it finds goes into `notes`.

    The candidate is to have given its memory back before. Windows are always the same ones: what was measured in one is
    not measured again.
    """

    def __init__(
        self,
        reference: Reference,
        config: TrainingConfig,
        conditions: Conditions,
        users_precision: Precision,
        notes: list[str],
    ) -> None:
        self._reference, self._config, self._conditions = reference, config, conditions
        self._users_precision, self._notes = users_precision, notes
        self._measured: defaultdict[tuple[Any, ...], dict[int, Difference]] = defaultdict(dict)
        self.unlike_itself = 0.0
        """What the program was last seen to differ from itself by, over all gradients."""

    @property
    def own_roundings(self) -> set[str]:
        """The types that the candidate rounds to."""
        return {kind for knob in KNOBS if (kind := knob.rounds_to(self._config[knob.name])) is not None}

    @property
    def roundings(self) -> set[str]:
        """The types that the candidate rounds to, and those that the user's program rounds to by itself."""
        return {*self.own_roundings, *self._reference.own_types}

    def allowance(
        self,
        expected: Sequence[Step],
        windows: list[Window],
        numbers: Sequence[int],
        *,
        depth: int,
        evaluated_norms: bool = False,
    ) -> Allowance:
        """In these of the windows (counted from 0). From weights and inputs rounded; from a depth of 1 on, outputs with
        them, and the user's own TF32; at a depth of 2, outputs alone."""
        roundings = sorted(self.roundings)
        inexact = partial(self._inexact, windows, expected, numbers, evaluated_norms)
        runs = [inexact(rounding=kind) for kind in roundings]
        uses_tf32 = self._conditions.device == "cuda" and self._users_precision.matters_to(expected[0].gradients)
        outputs = []
        if depth >= 1:
            if uses_tf32:
                runs.append(inexact(precision=self._users_precision))
            outputs += [_with_outputs_rounded(inexact, kind, kind) for kind in roundings]
        if depth >= MOST_DEPTH:
            outputs += [_with_outputs_rounded(inexact, kind, None) for kind in roundings]
        return replace(allowance(runs, outputs, roundings), is_exact=not roundings and not uses_tf32)

    def _inexact(
        self,
        windows: list[Window],
        expected: Sequence[Step],
        numbers: Sequence[int],
        evaluated_norms: bool,
        *,
        precision: Precision = HIGHEST,
        rounding: str | None = None,
        outputs: str | None = None,
    ) -> list[Difference]:
        """`Reference.inexact`, each step run once."""
        measured = self._measured[(evaluated_norms, precision, rounding, outputs)]
        if missing := [number for number in numbers if number not in measured]:
            measured |= self._reference.inexact(
                windows,
                expected,
                missing,
                precision=precision,
                rounding=rounding,
                outputs=outputs,
                evaluated_norms=evaluated_norms,
            )
        return [measured[number] for number in numbers]

    def with_repeat(
        self, allowed: Allowance, expected: Sequence[Step], windows: list[Window], *, evaluated_norms: bool = False
    ) -> Allowance:
        """As much more as the program differs from itself by when it is run once more: it may keep state outside its
        model, or add in no fixed order.

        Where it does repeat, and the candidate rounds nothing, that may still add in another order.
        """

        def again(rounding: str | None = None) -> list[Difference]:
            everywhere = range(len(windows))
            found = self._reference.inexact(
                windows, expected, everywhere, rounding=rounding, evaluated_norms=evaluated_norms, anew=True
            )
            return list(found.values())

        try:
            repeated = again()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return allowed  # the candidate's process holds memory that it cannot give back
        off = self.unlike_itself = max(step.gradients.relative_error for step in repeated)
        if not off > SAME_AGAIN:
            return allowed if self.roundings else wider(allowed, allowance([again("float32")]))
        self._notes.append(
            f"the user's own program, run twice from the same weights on the same samples, differs from itself by "
            f"{off:.2g}{' with BatchNorm in evaluation' if evaluated_norms else ''}: loss_fn or the model keeps a count or "
            "random numbers outside the model's state"
        )
        return wider(allowed, allowance([repeated])) if off <= LARGEST_REPEAT else allowed

    def with_norms_evaluated(
        self,
        expected: Sequence[Step],
        steps: list[Difference],
        allowed: Allowance,
        windows: list[Window],
        candidate: Callable[[Step], Difference],
    ) -> tuple[list[Difference], Allowance]:
        """Gradients with BatchNorm in evaluation; losses and buffers as they were, held to their floors over all windows.
        The same again where that tells nothing. `candidate`: its first step there, held against this one.

        At its first weights a deep network with BatchNorm may be so sensitive that the last place of a bf16 number turns
        its gradient around: ResNet-50 shows 1.1 for rounded weights, and with BatchNorm in evaluation 0.007 (CPU).
        """
        everywhere = range(len(windows))
        allowed = wider(self.allowance(expected, windows, everywhere, depth=MOST_DEPTH), allowed)
        calm, first = self._reference.step(windows[0], evaluated_norms=True), windows[:1]
        if first_not_finite(calm.gradients) is not None:
            return steps, allowed
        floors = self.allowance([calm], first, [0], depth=MOST_DEPTH, evaluated_norms=True)
        if floors.is_blind:
            return steps, allowed
        found = candidate(calm)
        self._notes.append(
            f"rounding alone moves the gradient by {allowed.relative_error:.2g} of itself: gradients were compared with "
            "BatchNorm in evaluation, losses and buffers in training"
        )
        steps = [
            replace(step, gradients=replace(found.gradients, missing=step.gradients.missing))
            if math.isfinite(step.gradients.relative_error)
            else step
            for step in steps
        ]
        both = _gradients_and_the_rest(floors, allowed)
        if fault(steps, both, 1):
            floors = self.with_repeat(floors, [calm], first, evaluated_norms=True)
            both = _gradients_and_the_rest(floors, self.with_repeat(allowed, expected, windows))
        return steps, both


def _gradients_and_the_rest(evaluated: Allowance, training: Allowance) -> Allowance:
    return replace(
        evaluated, buffer_errors=training.buffer_errors, loss_error=training.loss_error, largest_of_buffer=math.inf
    )


def _with_outputs_rounded(
    inexact: Callable[..., list[Difference]], kind: str, rounding: str | None
) -> list[Difference]:
    try:
        return inexact(outputs=kind, rounding=rounding)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return []  # the user's model refuses hooks (scripted modules), or what they add (torch.func)

"""What the user's own program does else with the same samples in other batches: nothing but the batches is changed."""

from __future__ import annotations

import math

from autotune.measurement.gradients import first_not_finite
from autotune.measurement.measure import PhaseReport
from autotune.measurement.reference import SAME_AGAIN, Reference
from autotune.measurement.runs import Difference, Run, Step, difference
from autotune.measurement.seeds import Means
from autotune.measurement.verdict import (
    Allowance,
    allowance,
    drift_fault,
    finer_fault,
    split_fault,
    widened,
    wider,
)
from autotune.surgery.out_of_memory import is_out_of_memory
from autotune.training.windows import Window, samples_in


class OtherBatches:
    """Holds the user's program against itself. What differs and is no fault goes into `notes`.

    `norms_follow`: the model has norms that leave something else behind for a batch than for its parts.
    """

    def __init__(self, reference: Reference, norms_follow: bool, phase: PhaseReport, notes: list[str]) -> None:
        self._reference, self._norms_follow, self._phase, self._notes = reference, norms_follow, phase, notes
        self.whole_step: Step | None = None
        """On the first window in one piece, with norms in evaluation, as far as it was run."""
        self._means: Means | None = None
        """Of the same."""

    def forget(self) -> None:
        """Gives back the memory of what was kept of the first window."""
        self.whole_step = self._means = None

    def accumulation_fault(
        self, whole: list[Window], windows: list[Window], run: Run, draws: bool
    ) -> tuple[str, Difference, Allowance]:
        """What splitting a step does, empty where that is nothing; with the difference and what was allowed.

        `run`: the user's program on the windows as they are split. `draws`: it draws random numbers.
        """
        expected = self.whole_step = self._reference.step(whole[0], evaluated_norms=True)
        if first_not_finite(expected.gradients) is not None:
            return "", difference(expected, expected), allowance()  # a deep model that BatchNorm alone keeps finite
        found = difference(expected, self._reference.step(windows[0], evaluated_norms=True))
        pieces, allowed = len(windows[0]), self._own_allowance()
        reason = split_fault(found, allowed, pieces)
        if reason and draws:  # a step that is split draws others
            found, allowed = self._split_by_means(whole[0], windows[0])
            reason = split_fault(found, allowed, pieces)
        return reason or self._split_drift_fault(whole, run, pieces), found, allowed

    def finer_cut_fault(self, whole: Window, finer: Window, expected: Step | None, draws: bool) -> str:
        """What shows that the loss is no mean over its samples where these are cut finer than the candidate does; empty
        where nothing does.

        A mean by weights of classes is split rightly where all parts hold as many of each class, which two halves of a
        batch do by chance. `finer`: the samples of `whole` in smaller parts. `expected`: the user's step on `whole`, where
        that is known.
        """
        self._phase("parity")  # each has a time limit of its own
        if expected is None:
            expected = self._reference.step(whole, evaluated_norms=True)
        if first_not_finite(expected.gradients) is not None:
            return ""
        try:
            found = difference(expected, self._reference.step(finer, evaluated_norms=True))
        except Exception as error:  # no batch of the candidate's is so small
            if is_out_of_memory(error):
                raise
            return ""
        pieces, allowed = len(finer), self._own_allowance()
        reason = finer_fault(found, allowed, pieces)
        if not math.isfinite(found.loss + found.gradients.relative_error):
            return "" if self._reference.returns_weight else reason  # 0 of 0 tokens, and none of its gradient counts
        if not reason or not draws:
            return reason and self._beyond_rounding(found, expected, whole, pieces)
        self._phase("parity")
        means = self._means_of(whole)
        self._phase("parity")
        found = difference(means.step(), self._reference.means(finer, evaluated_norms=True).step())
        return finer_fault(found, widened(allowed, means), pieces)

    def _beyond_rounding(self, found: Difference, expected: Step, window: Window, pieces: int) -> str:
        """The same beside what the program differs from itself by; nothing can be told of one that counts its calls."""
        self._phase("parity")
        again = difference(expected, self._reference.step(window, evaluated_norms=True)).gradients.relative_error
        if not again <= SAME_AGAIN:
            return ""
        runs = [
            self._reference.inexact([window], [expected], [0], rounding=kind, evaluated_norms=True).values()
            for kind in sorted(self._reference.own_types) or ["float32"]
        ]
        return finer_fault(found, wider(self._own_allowance(), allowance(map(list, runs))), pieces)

    def _means_of(self, whole: Window) -> Means:
        if self._means is None:
            self._means = self._reference.means(whole, evaluated_norms=True)
        return self._means

    def _split_by_means(self, whole: Window, window: Window) -> tuple[Difference, Allowance]:
        """Over several seeds. One seed's gradient may be off by more than that of a sum that is taken for a mean."""
        self._phase("parity")  # each has a time limit of its own
        expected = self._means_of(whole)
        self._phase("parity")
        found = self._reference.means(window, evaluated_norms=True)
        return difference(expected.step(), found.step()), widened(self._own_allowance(), expected)

    def _split_drift_fault(self, whole: list[Window], run: Run, pieces: int) -> str:
        """What the model itself moves at each of the micro-batches, and the user's program once a step."""
        if all(drift.moved <= drift.rounding for drift in run.drifts.values()):
            return ""
        return drift_fault(self._reference.run(whole).drifts, run.drifts, len(whole), pieces)

    def larger_batch_fault(self, run: Run, windows: list[Window], own_batches: Window) -> str:
        """What is left out of a batch larger than the user's own; empty where nothing is.

        That the gradient is another one is no fault: a loss may couple the samples of its batch. It is noted, where the
        batch holds not so many of the user's own that a step on all of them would take long.

        `run`: the user's program on the windows. `own_batches`: samples of the first window in batches of the user's own.
        """
        expected = self._reference.step(own_batches, evaluated_norms=True)
        if first_not_finite(expected.gradients) is not None:
            return ""
        whole = self._reference.step(windows[0], evaluated_norms=True) if self._norms_follow else run.steps[0]
        found = difference(expected, whole).gradients
        size, own = samples_in(windows[0]), own_batches[0].samples
        missing = found.missing
        if missing:  # or it takes its parts in turn, and leaves one out of a single batch of theirs as well
            first = self._reference.step(own_batches[:1], evaluated_norms=True)
            missing = difference(first, whole).gradients.missing
        if missing:
            return (
                f"{missing[0]} has a gradient at your batch of {own} and none at {size}: the model leaves a part out "
                "of larger batches"
            )
        if samples_in(own_batches) < size or found.relative_error <= self._own_allowance().tolerance:
            return ""
        again = difference(expected, self._reference.step(own_batches, evaluated_norms=True)).gradients
        if found.relative_error > again.relative_error:
            self._notes.append(
                f"your program in fp32 gives another gradient for {size} samples at once than for the same in batches of "
                f"{own}, by {found.relative_error:.2g}: its loss couples the samples of a batch, or its model treats "
                "larger batches differently"
            )
        return ""

    def _own_allowance(self) -> Allowance:
        """Of the program beside itself: the rounding of its own types."""
        return allowance(roundings=self._reference.own_types)

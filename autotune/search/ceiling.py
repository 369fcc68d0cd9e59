"""Which batch to try next to find the largest that fits: pure, told readings, asked for batches.

On CUDA the peak of forward and backward is `a + b * batch`, with a >= 0. So one reading bounds the ceiling from below
(`limit * batch / peak` must fit), two readings give the slope, and the batch that they predict is then run itself:
three probes, none out of memory. Where the readings do not move (a plateau: constants such as the optimizer's own peak
exceed what grows with the batch) they are no slope, and where bytes say nothing the batch is doubled and then bisected.
Whatever was predicted, only a batch that ran is an answer.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

EXACT_UP_TO = 300
"""Ceilings up to here are found to the last sample."""

CAUTION = 0.9
"""Share of a safe bound that is probed, since the reading under it is not exact to the last byte."""

APART = 0.8
"""A slope is taken from two batches of which one is at most this share of the other, where there are such."""


@dataclass(frozen=True)
class CeilingResult:
    """What the probes say so far. Every batch in it was run."""

    largest_batch_size: int | None
    """The largest that fits; None where none did."""
    smallest_failed_batch_size: int | None
    """The smallest above it that did not fit; None where none was met."""
    probes: int
    stopped_because: str
    """Why nothing larger is tried, in words; empty while the search goes on."""


@dataclass(frozen=True)
class _Reading:
    batch: int
    fits: bool
    peak_bytes: int | None
    affine: bool


class _Step(NamedTuple):
    """The next batch, or None and the reason to stop."""

    batch: int | None
    reason: str = ""
    predicted: bool = False
    """Two readings say that it fits and nothing above it does."""


class CeilingSearch:
    """Steps towards the largest batch that fits: `next()` names one, `tell()` says what became of it.

    `limit_bytes` is what the process may use, of which the share `margin` stays free; None where it is not known.
    No batch above `cap` is named, and only those in `allowed` where that is given (divisors of a held global batch).
    `start` is tried first, or the next smaller one that is allowed: expected to fit, and better not 1.

    The answer is exact up to `EXACT_UP_TO`; above that it may be the share `resolution` below the true ceiling, which
    saves probes. Where the bytes are affine and `start` fits, at most three probes are made and none fails, with one
    exception: where there may be no room for more than the smallest size, only running the next tells. Readings on a
    plateau, or from either side of its end, can cost failures and probes more. Where readings are not exact, a
    prediction that ran is the answer unless they now predict more than `resolution` above it.

    Raises ValueError where nothing is left to try.
    """

    def __init__(
        self,
        *,
        limit_bytes: int | None,
        cap: int,
        start: int,
        margin: float = 0.05,
        allowed: Sequence[int] | None = None,
        resolution: float = 0.03,
    ) -> None:
        self._sizes: Sequence[int] = (
            range(1, cap + 1) if allowed is None else sorted({size for size in allowed if 1 <= size <= cap})
        )
        if not self._sizes:
            raise ValueError(f"no batch size to try: at most {cap}, and allowed are {list(allowed or ())}")
        self._usable_bytes = None if limit_bytes is None else int(limit_bytes * (1 - margin))
        self._start = start
        self._resolution = resolution
        self._readings: dict[int, _Reading] = {}
        self._predicted: set[int] = set()

    def next(self) -> int | None:
        """The batch to probe, or None when the answer is known. Never one that was told already."""
        step = self._choose()
        if step.predicted and step.batch is not None:
            self._predicted.add(step.batch)
        return step.batch

    def tell(self, batch: int, *, fits: bool, peak_bytes: int | None, affine: bool) -> None:
        """What became of a batch, whether or not it was asked for.

        `fits`: it ran and left the margin. `peak_bytes`: what it took of the limit, of a probe that failed too where
        that is known. `affine`: these bytes grow in proportion to the batch (a CUDA allocator).
        """
        self._readings.pop(batch, None)
        self._readings[batch] = _Reading(batch, fits, peak_bytes, affine)

    def result(self) -> CeilingResult:
        """What is known now; complete once `next()` returns None."""
        low, high = self._low(), self._high()
        return CeilingResult(
            largest_batch_size=low.batch if low else None,
            smallest_failed_batch_size=high.batch if high else None,
            probes=len(self._readings),
            stopped_because=self._choose().reason,
        )

    def _low(self) -> _Reading | None:
        """The largest allowed batch that fits."""
        fitting = [one for one in self._readings.values() if one.fits and one.batch in self._sizes]
        return max(fitting, key=lambda one: one.batch, default=None)

    def _high(self) -> _Reading | None:
        """The smallest batch above it that does not."""
        low = self._low()
        failed = [one for one in self._readings.values() if not one.fits and (low is None or one.batch > low.batch)]
        return min(failed, key=lambda one: one.batch, default=None)

    def _choose(self) -> _Step:
        low, high = self._low(), self._high()
        first = bisect.bisect_right(self._sizes, low.batch) if low else 0
        end = bisect.bisect_left(self._sizes, high.batch) if high else len(self._sizes)
        open_sizes = self._sizes[first:end]
        if low is None:
            return self._first_that_fits(open_sizes, high)
        if not open_sizes and high is None:
            return _Step(None, f"{low.batch} is the largest batch that may be tried")
        if not open_sizes or (high is not None and self._close_enough(low.batch, open_sizes[-1])):
            assert high is not None
            return _Step(None, f"{high.batch} did not fit")
        if self._usable_bytes is not None and low.affine and low.peak_bytes:
            step = self._by_bytes(low, low.peak_bytes, self._usable_bytes, open_sizes, high)
            if step is not None:
                return step
        target = 2 * low.batch if high is None else (low.batch + high.batch) // 2
        return _Step(open_sizes[min(bisect.bisect_left(open_sizes, target), len(open_sizes) - 1)])

    def _first_that_fits(self, open_sizes: Sequence[int], high: _Reading | None) -> _Step:
        """Nothing has fitted yet: `start` unless it is known to be too large, then halves."""
        if not open_sizes:
            return _Step(None, f"not even {self._sizes[0]} fits")
        target = self._start if high is None or self._start < high.batch else high.batch // 2
        return _Step(_at_most(target, open_sizes) or open_sizes[0])

    def _by_bytes(
        self, low: _Reading, peak_bytes: int, usable_bytes: int, open_sizes: Sequence[int], high: _Reading | None
    ) -> _Step | None:
        """What affine bytes say to do; None where they say nothing, or something that a failure has refuted."""
        slope = self._slope()
        # A prediction that failed is not followed by another: from a plateau it would creep down one batch at a time.
        if slope is not None and list(self._readings.values())[-1].fits:
            predicted = low.batch + int((usable_bytes - peak_bytes) // slope)
            if high is None or predicted < high.batch:
                batch = _at_most(predicted, open_sizes)
                if batch is None or self._close_enough(low.batch, batch):
                    return _Step(
                        None, f"{open_sizes[0]} is predicted to need more than the {usable_bytes} usable bytes"
                    )
                return _Step(batch, predicted=True)
        safe = _at_most(int(CAUTION * low.batch * usable_bytes / peak_bytes), open_sizes)
        far_enough = 2 * low.batch if high is None else (low.batch + high.batch) / 2
        if safe is not None and (safe >= far_enough or safe == open_sizes[-1]):
            return _Step(safe)
        # A second reading, below, costs one probe that fits; halving the rest of the way costs several that may not.
        only_reading = sum(one.fits and one.affine for one in self._readings.values()) == 1
        smaller = _at_most(low.batch // 2, self._sizes)
        return _Step(smaller) if only_reading and smaller is not None and smaller not in self._readings else None

    def _slope(self) -> Fraction | None:
        """Of readings that fit alone: from these, even from a plateau, what is predicted is no less than the true
        ceiling, so a prediction that ran is the answer. A line up to one that did not fit would predict less."""
        told = [one for one in self._readings.values() if one.fits and one.affine]
        return bytes_per_sample({one.batch: one.peak_bytes for one in told if one.peak_bytes})

    def _close_enough(self, batch: int, better: int) -> bool:
        """Whether running `better` could gain too little over `batch`, which ran."""
        exact = batch < EXACT_UP_TO and batch not in self._predicted
        return not exact and better <= batch * (1 + self._resolution)


def bytes_per_sample(peaks: Mapping[int, int]) -> Fraction | None:
    """Bytes a sample between the largest batch of `peaks` and the next that is `APART` from it.

    None where there are fewer than two, and where the bytes do not grow between them: a plateau.
    """
    if len(peaks) < 2:
        return None
    *smaller, top = sorted(peaks)
    apart = [batch for batch in smaller if batch <= APART * top]
    partner = (apart or smaller)[-1]
    slope = Fraction(peaks[top] - peaks[partner], top - partner)
    return slope if slope > 0 else None


def _at_most(target: int, sizes: Sequence[int]) -> int | None:
    """The largest of the ascending sizes that does not exceed the target."""
    position = bisect.bisect_right(sizes, target)
    return sizes[position - 1] if position else None

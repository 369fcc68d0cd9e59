"""`Results`: from what was measured to the configurations that may be recommended. Pure, and asked again at any time."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune.config import TrainingConfig, Value
from autotune.knobs.registry import KNOBS
from autotune.records import Answer, Failure, Measurement, ParityResult, Ratio, Settings, Trial
from autotune.space import MemoryClass, SearchSpace
from autotune.stats import FEWEST_ROUNDS, UNKNOWN, faster, rate, ratio, ratio_from_intervals, student_t

WORTHWHILE_GAIN = 1.02
"""A configuration must be so many times better to be preferred to a simpler one (design, section 9)."""
CERTAIN = 0.99
LIKELY = 0.8
"""Of a two-sided interval: one time in ten it lies wholly above a truth that is no gain."""
PROCESS_SPREAD = 0.02
EXPECTED_DEGREES = 3
"""From process to process the rate of one configuration varies by so much, which one or two rounds hardly show; the
expectation weighs as much as so many rounds."""


Pair = tuple[Measurement, Measurement]
"""Of a configuration, and of the one that it is compared with."""


@dataclass(frozen=True)
class Results:
    """All that decides what is recommended."""

    trials: Sequence[Trial]
    baseline: TrainingConfig
    parity_results: dict[str, ParityResult | Failure]
    """Numerics key to the outcome of the check."""
    space: SearchSpace
    settings: Settings
    misfits: Mapping[MemoryClass, int] = field(default_factory=dict)
    """The smallest micro-batch that did not fit, by memory settings."""
    unconfirmed: bool = False
    """The search was interrupted: what was measured once counts too, and says that it was not confirmed."""

    # --- what may be recommended ---

    def best(self) -> Answer:
        """The best that is certainly worthwhile and keeps the held batch; the baseline where nothing is."""
        return self._choose([one for one in self._eligible() if self.keeps_the_batch(one.config)])

    def keeps_the_batch(self, config: TrainingConfig) -> bool:
        """Whether an optimizer step takes as many samples as are held, if any are."""
        return self.space.holds(config, self.settings.conditions.global_batch_size)

    def free_batch(self) -> Answer | None:
        """Where a batch is held, the best with another one, if letting it go is worthwhile."""
        if self.settings.conditions.global_batch_size is None:
            return None
        best, freer = self.best(), self._choose(self._eligible())
        worthwhile = self.gain(freer) >= WORTHWHILE_GAIN * self.gain(best)
        return freer if freer.effective_batch_size != best.effective_batch_size and worthwhile else None

    def gain(self, answer: Answer) -> float:
        """How many times better than the baseline, by the objective, as far as the knobs give it credit."""
        if self.settings.objective == "memory":
            return self.answer(self.baseline).peak_allocated_bytes / max(1, answer.peak_allocated_bytes)
        return answer.speedup.value * self.space.credit(answer.config)

    def _eligible(self) -> list[Answer]:
        """Configurations that were re-measured beside the baseline and have no failure of any kind."""
        failed = {trial.config for trial in self.trials if trial.failure is not None}
        configs = dict.fromkeys(
            trial.config
            for trial in self.trials
            if (trial.round is not None or (self.unconfirmed and self._may_lead(trial)))
            and trial.config not in failed
            and trial.config != self.baseline
            and not self.saves_memory_for_nothing(trial.config)
        )
        return [self.answer(config) for config in configs]

    def saves_memory_for_nothing(self, config: TrainingConfig) -> bool:
        """Whether it has a value that can do nothing but save memory, and nothing shows that the same without it does not
        run or is slower: that it was faster was chance, then."""
        if self.settings.objective == "memory":
            return False
        savers = [knob.name for knob in KNOBS if knob.only_saves_memory and knob.name in self.space.varied]
        own = self.space.baseline
        changed = [name for name in savers if config[name] != own[name]]
        return any(not self._is_needed(config, config.replace({name: own[name]})) for name in changed)

    def _is_needed(self, config: TrainingConfig, plain: TrainingConfig) -> bool:
        smallest_misfit = self.misfits.get(self.space.memory_class(plain))
        if smallest_misfit is not None and self.space.micro_batch(plain) >= smallest_misfit:
            return True
        if any(trial.config == plain and trial.failure is not None for trial in self.trials):
            return True
        own, other = self.first_measurement(config), self.first_measurement(plain)
        if own is None or other is None:
            return False
        return own.samples_per_second >= WORTHWHILE_GAIN * other.samples_per_second

    def _may_lead(self, trial: Trial) -> bool:
        """Whether a trial outside the confirmation was measured to the end and trains the same."""
        stopped = trial.measurement is not None and trial.measurement.stopped_early
        return not stopped and self._trains_the_same(trial.config)

    def _trains_the_same(self, config: TrainingConfig) -> bool:
        """Whether it, or one whose gradients come about in the same way, computes what the baseline does."""
        key = self.space.numerics_key(config)
        found = self.parity_results.get(key)
        if found is not None:
            return isinstance(found, ParityResult) and found.passed
        return (
            key == self.space.numerics_key(self.baseline) or self.space.gradient_key(config) in self.known_gradients()
        )

    def known_gradients(self) -> set[tuple[object, ...]]:
        """The ways to compute a gradient that are known to be right: the baseline's, and those that passed a check."""
        passed = {self.space.gradient_key(t.config) for t in self.trials if t.parity is not None and t.parity.passed}
        return {self.space.gradient_key(self.baseline), *passed}

    def _choose(self, answers: list[Answer]) -> Answer:
        """The best that is certainly worthwhile; ties go to the smaller batch and the simpler configuration."""
        worthwhile = [one for one in answers if self._certainly_better(one)]
        if not worthwhile:
            return self.answer(self.baseline)
        top = max(worthwhile, key=self.gain)
        near = [
            one
            for one in worthwhile
            if self.gain(one) * WORTHWHILE_GAIN >= self.gain(top) or self._is_as_good_with_less(one, top)
        ]
        return min(near, key=lambda one: (one.effective_batch_size, self.space.rank(one.config)))

    def _is_as_good_with_less(self, one: Answer, other: Answer) -> bool:
        """Whether it is the other without some of its changes, and their rounds do not tell the two apart: those that both
        were measured in, or else what each gained over the baseline.

        Both are certainly better than the baseline, so nothing is promised here that needs certainty: where the odds are
        nine to one that the further changes pay, they are kept.
        """
        if self.settings.objective == "memory" or not self.is_part_of(one.config, other.config):
            return False
        own, others = self._by_round(one.config), self._by_round(other.config)
        pairs = [(others[number], own[number]) for number in sorted(own.keys() & others.keys())]
        if pairs:
            return _moderated_ratio(pairs, LIKELY).interval[0] <= 1
        more, less = other.speedup, one.speedup
        return ratio_from_intervals(more.value, more.interval, less.value, less.interval)[1][0] <= 1

    def is_part_of(self, config: TrainingConfig, other: TrainingConfig) -> bool:
        """Whether a configuration has some of the changes of another one and no more, at the same batch."""
        own, others = config.changes_from(self.baseline), other.changes_from(self.baseline)
        same_batch = config[self.space.batch_name] == other[self.space.batch_name]
        return same_batch and bool(own) and own.items() < others.items()

    def _certainly_better(self, answer: Answer) -> bool:
        """Worthwhile, and no accident of noise: several are compared, so that 95 % would be too little."""
        if self.gain(answer) < WORTHWHILE_GAIN:
            return False
        return self.settings.objective == "memory" or self.deciding_interval(answer.config)[0] > 1

    def deciding_interval(self, config: TrainingConfig) -> tuple[float, float]:
        """Of the speed-up, at the level at which it is decided whether that is certain: whoever says that it is not shows
        this one, for the 95 % interval may lie above 1."""
        return _deciding_interval(*self._looks(config))

    def likely(self) -> Answer | None:
        """The best that keeps the held batch and is worthwhile by its 95 % interval alone, or by too few rounds for any
        interval to tell; None where nothing is."""
        answers = [
            one
            for one in self._eligible()
            if self.keeps_the_batch(one.config)
            and self.gain(one) >= WORTHWHILE_GAIN
            and (one.speedup.interval[0] > 1 or one.confirmed_rounds < FEWEST_ROUNDS)
        ]
        return max(answers, key=self.gain, default=None)

    @property
    def reference_settings(self) -> dict[str, Value]:
        """What the baseline takes beside the user's own settings, where their program fits at no batch without."""
        return self.space.beside_own(self.baseline)

    def whose(self, own: str) -> str:
        """What the baseline is called: `own`, unless it is not quite the user's."""
        return "the reference" if self.reference_settings else own

    # --- one configuration ---

    def answer(self, config: TrainingConfig) -> Answer:
        """One configuration with its evidence; reasons and prices are added to those that are shown."""
        space = self.space
        confirmations = self.measurements(config, rounds=True)
        every = [*confirmations, *self.measurements(config, rounds=False)]
        counted = confirmations or every
        value, interval = _joint_rate(counted)
        weight, weight_interval = _joint_weight_rate(counted)
        reserved = [one.memory.reserved_bytes for one in every if one.memory.reserved_bytes is not None]
        parity = self.parity_results.get(space.numerics_key(config))
        return Answer(
            config=config,
            effective_batch_size=space.effective_batch(config),
            micro_batch_size=space.micro_batch(config),
            micro_batches_per_step=space.micro_batches(config),
            samples_per_second=value,
            interval=interval,
            block_count=sum(len(one.blocks.seconds) for one in counted),
            weight_per_second=weight,
            weight_interval=weight_interval,
            speedup=self._speedup(config),
            computes_the_same=space.numerics_key(config) == space.numerics_key(self.baseline),
            confirmed_rounds=len(confirmations),
            peak_allocated_bytes=max(one.memory.peak_allocated_bytes for one in every),
            reserved_bytes=max(reserved, default=None),
            compile_seconds=0.0,
            compile_pays_after_steps=None,
            parity=parity if isinstance(parity, ParityResult) else None,
        )

    def measurements(self, config: TrainingConfig, *, rounds: bool) -> list[Measurement]:
        """Those of the confirmation, or those outside it."""
        return [
            trial.measurement
            for trial in self.trials
            if trial.config == config and trial.measurement is not None and (trial.round is not None) == rounds
        ]

    def first_measurement(self, config: TrainingConfig) -> Measurement | None:
        """The one that the search itself made, with its resident rate."""
        found = self.measurements(config, rounds=False)
        return found[-1] if found else None

    def round_pairs(self, config: TrainingConfig) -> list[Pair]:
        """The configuration and the baseline, in the rounds of the confirmation that both have."""
        own, base = self._by_round(config), self._by_round(self.baseline)
        return [(own[number], base[number]) for number in sorted(own.keys() & base.keys())]

    def _by_round(self, config: TrainingConfig) -> dict[int, Measurement]:
        return {
            trial.round: trial.measurement
            for trial in self.trials
            if trial.config == config
            and trial.round is not None
            and trial.measurement is not None
            and trial.failure is None
        }

    def _speedup(self, config: TrainingConfig) -> Ratio:
        """As told: the 95 % interval that the rounds themselves give where there are enough."""
        if config == self.baseline:
            return Ratio(value=1.0, interval=(1.0, 1.0))
        return _told_ratio(*self._looks(config))

    def _looks(self, config: TrainingConfig) -> tuple[list[Pair], Pair | None]:
        """The rounds of the configuration and the baseline, and what the search saw of the two before, where it measured
        both to the end; without rounds, that alone."""
        pairs = self.round_pairs(config)
        own, base = self.first_measurement(config), self.first_measurement(self.baseline)
        if not pairs:
            assert own is not None and base is not None
            return [(own, base)], None
        if own is None or base is None or own.stopped_early or base.stopped_early:
            return pairs, None
        return pairs, (own, base)


def gain_of_update(one: Measurement, other: Measurement) -> float | None:
    """How many times faster a step is than another one by its update, all else alike, as the share that it takes tells; None
    where that was not seen. Either share is seen within one process, so that it does not matter how far processes differ."""
    if one.update_share is None or other.update_share is None or other.update_share >= 1:
        return None
    return (1 - one.update_share) / (1 - other.update_share)


def surely_faster(pairs: Sequence[Pair]) -> bool:
    """Whether the first of each pair is faster than the second at the 1 % level, however little."""
    return _deciding_interval(pairs)[0] > 1


def _deciding_interval(pairs: Sequence[Pair], earlier: Pair | None = None) -> tuple[float, float]:
    """The 99 % interval of the ratio. What is expected of processes only makes it wider: on a machine where they differ by
    more (13 % from one to the next, on two cores that nine others want), enough rounds must show it by themselves."""
    low, high = _moderated_ratio(pairs, CERTAIN, earlier).interval
    if len(pairs) < FEWEST_ROUNDS:
        return low, high
    own_low, own_high = ratio(*_rates(pairs), CERTAIN)[1]
    return min(low, own_low), max(high, own_high)


def settled(pairs: Sequence[Pair]) -> bool:
    """Whether these rounds of a configuration and the baseline say enough of the two: another round can change nothing."""
    if len(pairs) < FEWEST_ROUNDS:
        return False
    return faster(*_rates(pairs), minimum_gain=WORTHWHILE_GAIN - 1) != "undecided"


def _told_ratio(pairs: Sequence[Pair], earlier: Pair | None) -> Ratio:
    """With the 95 % interval that the rounds themselves give where there are enough."""
    if len(pairs) < FEWEST_ROUNDS:
        return _moderated_ratio(pairs, 0.95, earlier)
    value, interval = ratio(*_rates(pairs))
    return Ratio(value=value, interval=interval)


def _rates(pairs: Sequence[Pair]) -> tuple[list[float], list[float]]:
    """Of the first of each pair, and of the second."""
    return [one.samples_per_second for one, _ in pairs], [other.samples_per_second for _, other in pairs]


def _moderated_ratio(pairs: Sequence[Pair], confidence: float, earlier: Pair | None = None) -> Ratio:
    """From few rounds, which do not show well how far processes differ: what is expected of them counts as so many more.

    To that the spread within the processes is added. Where there are too few rounds to show it, what is `earlier` is a
    further look at how far processes differ, and makes the interval no narrower.
    """
    looks = [_look(pair) for pair in pairs]
    logs = [math.log(one) for one, _ in looks]
    rounds, mean = len(logs), math.fsum(logs) / len(logs)
    value = math.exp(mean)
    if any(low <= 0 or high >= sys.float_info.max for _, (low, high) in looks):
        return Ratio(value=value, interval=UNKNOWN)
    between = _between_processes(logs, 2 * PROCESS_SPREAD**2, confidence)
    if earlier is not None and rounds < FEWEST_ROUNDS:
        squares = _unexplained(earlier, mean) ** 2 * rounds / (rounds + 1)
        between = max(between, _between_processes(logs, 2 * PROCESS_SPREAD**2, confidence, (squares, 1)))
    below = math.hypot(between, max(math.log(one / low) for one, (low, _) in looks) / math.sqrt(rounds))
    above = math.hypot(between, max(math.log(high / one) for one, (_, high) in looks) / math.sqrt(rounds))
    return Ratio(value=value, interval=(value * math.exp(-below), value * math.exp(above)))


def _look(pair: Pair) -> tuple[float, tuple[float, float]]:
    one, other = pair
    return ratio_from_intervals(one.samples_per_second, one.interval, other.samples_per_second, other.interval)


def _unexplained(pair: Pair, mean: float) -> float:
    """How far the logarithm of a pair's ratio is from the mean, beyond what its measurements spread by themselves."""
    value, (low, high) = _look(pair)
    nearest = low if mean < math.log(value) else high
    own = abs(math.log(nearest / value)) if 0 < nearest < sys.float_info.max else math.inf
    return max(0.0, abs(math.log(value) - mean) - own)


def _joint_rate(measurements: Sequence[Measurement]) -> tuple[float, tuple[float, float]]:
    """Over several processes each is one block; within one, its own interval."""
    if len(measurements) == 1:
        return measurements[0].samples_per_second, measurements[0].interval
    return _over_processes([(sum(one.blocks.samples), sum(one.blocks.seconds)) for one in measurements])


def _over_processes(parts: Sequence[tuple[float, float]]) -> tuple[float, tuple[float, float]]:
    """The rate of several processes, from what each did and the seconds that it took, with its 95 % interval.

    Two processes hardly show how far processes differ, so what is expected of them counts there too.
    """
    value, interval = rate([amount for amount, _ in parts], [seconds for _, seconds in parts])
    if len(parts) < FEWEST_ROUNDS:
        half_width = _between_processes(
            [math.log(amount / seconds) for amount, seconds in parts], PROCESS_SPREAD**2, 0.95
        )
        interval = value * math.exp(-half_width), value * math.exp(half_width)
    return value, interval


def _between_processes(
    logs: Sequence[float], expected_variance: float, confidence: float, further: tuple[float, int] = (0.0, 0)
) -> float:
    """Half the width of a moderated t interval (G. K. Smyth, 2004) of the mean of these logarithms: the variance that is
    expected counts as `EXPECTED_DEGREES` more looks. `further`: squares and degrees that were seen elsewhere."""
    rounds, mean = len(logs), math.fsum(logs) / len(logs)
    degrees = EXPECTED_DEGREES + rounds - 1 + further[1]
    squares = math.fsum((one - mean) ** 2 for one in logs) + further[0]
    variance = (EXPECTED_DEGREES * expected_variance + squares) / degrees
    return student_t(confidence, degrees) * math.sqrt(variance / rounds)


def _joint_weight_rate(measurements: Sequence[Measurement]) -> tuple[float | None, tuple[float, float] | None]:
    """The same in the loss's own weight; None where it gives none."""
    if any(one.weight_interval is None for one in measurements):
        return measurements[0].weight_per_second, None
    if len(measurements) == 1:
        return measurements[0].weight_per_second, measurements[0].weight_interval
    return _over_processes([(sum(one.blocks.weights), sum(one.blocks.seconds)) for one in measurements])

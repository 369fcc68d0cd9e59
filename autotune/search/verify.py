"""Whether a recommendation of an earlier search still holds: measured again in turn with the baseline, and checked."""

from __future__ import annotations

from autotune.config import TrainingConfig, settings_text
from autotune.knobs.registry import KNOBS
from autotune.options import HOLDING, VerifyOutcome, VerifyReport
from autotune.quantities import format_bytes, format_rate, format_share
from autotune.records import Answer, Failure, ParityResult, Ratio, Recommendation, Standing, Trial
from autotune.search.answers import WORTHWHILE_GAIN, settled
from autotune.search.baseline import baseline_error, run_baseline
from autotune.search.cautions import NOTABLE_MOVE, few_rounds, moved
from autotune.search.confirm import MOST_ROUNDS
from autotune.search.session import Session
from autotune.search.watcher import PassingWatcher

AS_LARGE = 1.05
"""Two speed-ups whose ratio is within this are about as large, whatever their intervals."""
NARROW_ENOUGH = 1.06
"""Upper over lower end of a speed-up's interval below which further rounds tell nothing that matters here."""


def verify(session: Session, claimed: Recommendation, changed: tuple[str, ...]) -> VerifyReport:
    """Measures baseline and recommendation in rounds of fresh processes, after the check that both train the same.

    `changed` says what differs from the machine and the program of the recommendation; it is told in the report.
    Raises as `run_baseline` does where the user's own program does not run.
    """
    session.watcher = WithoutBest(session.watcher)
    return _Verification(session, claimed, changed).report()


class WithoutBest(PassingWatcher):
    """Shows each rate alone: a best so far means nothing where nothing is searched."""

    def trial_finished(self, trial: Trial, best: Standing | None, free_batch: Standing | None) -> None:
        """Without the best."""
        super().trial_finished(trial, None, None)


class _Verification:
    """One verification: each method that judges returns the report if it has an answer."""

    def __init__(self, session: Session, claimed: Recommendation, changed: tuple[str, ...]) -> None:
        self.session = session
        self.claimed = claimed
        self.changed = changed
        self.config = claimed.best.config

    def report(self) -> VerifyReport:
        """The whole of it, ended by the first thing that speaks against the recommendation."""
        run_baseline(self.session, expected=self.claimed.reference_settings)
        if self.claimed.keep or self.config == self.session.baseline:
            return self._nothing_to_compare()
        return self._refused() or self._trained_differently() or self._failed() or self._compared()

    # --- in order ---

    def _nothing_to_compare(self) -> VerifyReport:
        """It runs, and how well: whether anything else is better is not seen, and a comparison with itself tells nothing."""
        now, then = self._answer(self._baseline), self.claimed.best
        which = "your settings were to be kept" if self.claimed.keep else "your settings are what was recommended"
        runs = f"{which}, and they run"
        if self.session.results().reference_settings:
            runs = f"{self._beside} is what was recommended, and it runs"
        if self.session.settings.objective == "memory":
            peak, before = now.peak_allocated_bytes, max(1, then.peak_allocated_bytes)
            figures, times = f"{format_bytes(peak)} at most, {format_bytes(before)} then", peak / before
            change = f"takes {times:.2f} times the memory of then"
        else:
            rate, before_rate = format_rate(now.samples_per_second), format_rate(then.samples_per_second)
            figures, times = f"{rate} samples/s, {before_rate} then", _times_as_fast(now, then)
            change = f"runs at {times:.2f} times the speed of then"
        told = f"{runs} ({figures}). There is nothing to compare: whether others are better by now, a search tells."
        if 1 / NOTABLE_MOVE <= times <= NOTABLE_MOVE:
            return self._told("holds", f"It holds as far as is seen without a search: {told}")
        return self._told("holds_differently", f"It holds, but your program {change}: {told}")

    def _refused(self) -> VerifyReport | None:
        """What the recommendation asks for is not to be had here any more, or makes another batch of a step."""
        reason = self.session.space.conflict(self.config) or self._not_offered()
        if reason is not None:
            failure = Failure(kind="conflict", phase="start", message=reason)
            return self._told("no_longer_runs", f"{self._shown} cannot be used here: {reason}", failure)
        held, step = self.session.facts.global_batch_size, self.session.space.effective_batch(self.config)
        if held is not None and step != held:
            reason = f"an optimizer step takes {step:,} samples with it, and {held:,} are to be held"
            return self._told("trains_differently", f"{self._shown} trains differently now: {reason}")
        return None

    def _not_offered(self) -> str | None:
        for knob in KNOBS:
            refused, value = knob.refused(self.session.facts), self.config[knob.name]
            reason = refused.get(value) or (
                refused.get(None) if value != self.session.space.baseline[knob.name] else None
            )
            if reason is not None:
                return f"{knob.name}: {reason}"
        return None

    def _trained_differently(self) -> VerifyReport | None:
        """The parity check, where anything that is computed differs."""
        session = self.session
        if session.space.numerics_key(self.config) == session.space.numerics_key(self._baseline):
            return None
        session.watcher.stage("parity", "whether it still trains the same")
        result = session.parity(self.config)
        if isinstance(result, Failure):
            return self._told("no_longer_runs", f"{self._shown}: {result.message}", result)
        if not result.passed:
            return self._told("trains_differently", f"{self._shown} trains differently now: {result.reason}")
        return None

    def _failed(self) -> VerifyReport | None:
        """The rounds, as many as are needed and there is time for; a report where the recommendation failed in one."""
        session = self.session
        session.watcher.stage("confirm", "the recommendation and your program, in turn, in fresh processes")
        for number in range(MOST_ROUNDS):
            if number and (self._is_clear() or not self._has_time(number)):
                break
            for config in (self._baseline, self.config):
                trial = session.measure_again(config, "confirm", confirm_round=number)
                if trial.failure is not None and config == self._baseline:
                    raise baseline_error(trial.failure)
                if trial.failure is not None:
                    what = f"{trial.failure.kind} in {trial.failure.phase}: {trial.failure.message}"
                    return self._told("no_longer_runs", f"{self._shown} no longer runs: {what}", trial.failure)
        return None

    def _compared(self) -> VerifyReport:
        """Both ran and train the same: is it still better, and by as much?"""
        results = self.session.results()
        now, then = self._answer(self.config), self.claimed.best
        better = results.best().config == self.config
        if self.session.settings.objective == "memory":
            return self._compared_memory(now, better)
        low, high = now.speedup.interval
        times = f"{now.speedup.value:.2f} times the speed of {self._beside}"
        speed = f"{times} (95 % interval {low:.2f} to {high:.2f})"
        found = f"{then.speedup.value:.2f} times when it was found"
        if not better and low <= then.speedup.value <= high:
            verdict = (
                f"It is not clear whether it holds: {self._shown} is {speed}, {found}. Give more time with --budget."
            )
            return self._told("unclear", verdict)
        if not better and now.speedup.value < WORTHWHILE_GAIN:
            return self._told("no_longer_better", f"{self._shown} is no longer faster: {speed}, {found}")
        if not better:
            low, high = results.deciding_interval(self.config)
            speed = f"{times} (99 % interval, which decides, {low:.2f} to {high:.2f})"
            doubt = "no longer faster for certain"
            return self._told("no_longer_better", f"{self._shown} is {doubt}: {speed}, {found}")
        if _as_large(now.speedup, then.speedup):
            return self._told("holds", f"It holds: {self._shown} is {speed}; {found}.")
        verdict = f"It holds, but the speed-up is now {now.speedup.value:.2f} instead of {then.speedup.value:.2f}"
        return self._told("holds_differently", f"{verdict}: {self._shown} is {speed}.")

    def _compared_memory(self, now: Answer, better: bool) -> VerifyReport:
        then = self.claimed
        share = now.peak_allocated_bytes / max(1, self._answer(self._baseline).peak_allocated_bytes)
        before = then.best.peak_allocated_bytes / max(1, then.baseline.peak_allocated_bytes)
        memory = f"{format_share(share)} of the peak memory of {self._beside}"
        shares = f"{format_share(before)} when it was found"
        if not better:
            return self._told("no_longer_better", f"{self._shown} needs no less memory now: {memory}, {shares}")
        if 1 / AS_LARGE <= share / max(before, 1e-9) <= AS_LARGE:
            return self._told("holds", f"It holds: {self._shown} needs {memory}; {shares}.")
        return self._told("holds_differently", f"It holds, but {self._shown} now needs {memory}, {shares}.")

    # --- pieces ---

    @property
    def _baseline(self) -> TrainingConfig:
        assert self.session.baseline is not None
        return self.session.baseline

    @property
    def _beside(self) -> str:
        """What the recommendation is held against."""
        settings = self.session.results().reference_settings
        return f"your program with {settings_text(settings)}" if settings else "your settings"

    @property
    def _shown(self) -> str:
        return settings_text(self.session.told_changes(self.config))

    def _is_clear(self) -> bool:
        pairs = self.session.results().round_pairs(self.config)
        low, high = self._answer(self.config).speedup.interval
        return settled(pairs) and high <= NARROW_ENOUGH * low

    def _has_time(self, number: int) -> bool:
        """For round `number`, if it takes as long as the one before."""
        last = [trial.seconds for trial in self.session.trials if trial.round == number - 1]
        return self.session.budget.left() > sum(last)

    def _uncertain(self) -> tuple[str, ...]:
        """What makes today's figures less sure than their intervals say."""
        results, more = self.session.results(), "give more time with --budget"
        if not results.measurements(self.config, rounds=True):
            return moved(results, self._baseline, results.whose("your own program"))
        return (
            *few_rounds(results, {"the recommendation": self.config}, more),
            *moved(results, self._baseline, results.whose("your own program")),
            *moved(results, self.config, "the recommendation"),
        )

    def _answer(self, config: TrainingConfig) -> Answer:
        return self.session.results().answer(config)

    def _told(self, outcome: VerifyOutcome, verdict: str, failure: Failure | None = None) -> VerifyReport:
        session, results = self.session, self.session.results()
        return VerifyReport(
            outcome=outcome,
            verdict=verdict
            if outcome in (*HOLDING, "unclear")
            else f"It no longer holds: {verdict.rstrip('.')}. Search again.",
            changed=self.changed,
            baseline_then=self.claimed.baseline,
            best_then=self.claimed.best,
            baseline=results.answer(self._baseline),
            reference_settings=results.reference_settings,
            best=results.answer(self.config) if results.measurements(self.config, rounds=True) else None,
            parity=_parity(session, self.config),
            # What it printed lies in a directory that is gone when this is read.
            failure=None if failure is None else failure.model_copy(update={"output_path": None}),
            warnings=(*session.warnings, *self._uncertain()),
            seconds=session.budget.elapsed(),
        )


def _parity(session: Session, config: TrainingConfig) -> ParityResult | None:
    found = session.parity_results.get(session.space.numerics_key(config))
    return found if isinstance(found, ParityResult) else None


def _times_as_fast(now: Answer, then: Answer) -> float:
    """How many times as fast the same settings run now; 1 where the intervals overlap."""
    overlap = now.interval[0] <= then.interval[1] and then.interval[0] <= now.interval[1]
    return 1.0 if overlap else now.samples_per_second / then.samples_per_second


def _as_large(now: Ratio, then: Ratio) -> bool:
    """Whether nothing says that one is larger: the intervals overlap, or the values are close."""
    overlap = now.interval[0] <= then.interval[1] and then.interval[0] <= now.interval[1]
    return overlap or 1 / AS_LARGE <= now.value / then.value <= AS_LARGE

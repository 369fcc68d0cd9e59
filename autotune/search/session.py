"""`Session`: what every stage of a search works with: run a trial, remember it, tell whoever watches."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.config import TrainingConfig, Value
from autotune.knobs.registry import KNOBS, slow_to_start
from autotune.memory_margin import limit_bytes, misfit
from autotune.records import (
    Failure,
    Measurement,
    MemoryMarks,
    ParityResult,
    Probe,
    SearchFacts,
    Settings,
    Stage,
    Standing,
    Trial,
    TrialAnswer,
    TrialKind,
    TrialRequest,
)
from autotune.search.answers import Results
from autotune.search.backend import TrialBackend
from autotune.search.budget import Budget
from autotune.search.coverage import ShortOf
from autotune.search.obstacles import Obstacles
from autotune.search.pace import Pace, hurried, trial_request
from autotune.search.watcher import SearchWatcher
from autotune.space import SearchSpace
from autotune.stats import OUT_OF_THE_RACE

if TYPE_CHECKING:
    from autotune.search.study import Study

CACHED_SHARE = {"cuda": 0.15, "cpu": 0.3}
"""Of a cold first step, what it takes where the compiler finds its output: 0.13 for GPT-2, 0.07 to 0.09 for 24 narrow layers
(H200); more on a CPU."""
FIRST_COMPILE_SECONDS = 15.0
"""A small model compiles in 10 to 20 s (two CPU cores, caches cold)."""
HURRIED_COMPILE_SECONDS = 2 * FIRST_COMPILE_SECONDS
"""The same where time is short, as it is where other work has the cores: one such trial must not take all that is left."""
UNKNOWN_TRIAL_SECONDS = 5.0
"""Before anything ran."""


@dataclass
class Session:
    """One search in progress. Everything learnt is in `study`; the rest is rebuilt from it by `resume`."""

    backend: TrialBackend
    study: Study
    space: SearchSpace
    settings: Settings
    budget: Budget
    watcher: SearchWatcher
    pace: Pace
    trials: list[Trial] = field(default_factory=list)
    probes: dict[tuple[str, str], TrialAnswer] = field(default_factory=dict)
    """Kind and configuration's key to what the probe found."""
    parity_results: dict[str, ParityResult | Failure] = field(default_factory=dict)
    """Numerics key to what the parity check said, or how it failed."""
    baseline: TrainingConfig | None = None
    """The configuration that everything is compared with, once it ran."""
    warnings: list[str] = field(default_factory=list)
    stage_seconds: dict[Stage, float] = field(default_factory=lambda: defaultdict(float))
    """What the trial processes of each stage took in this call."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What was not tried, by knob or in words, to a sentence that says why."""

    short_of: ShortOf | None = None
    """What kept the search from trying more; None where it had enough of it."""
    earlier_trial_count: int = 0
    """Of the trials, those that an earlier call ran."""

    def __post_init__(self) -> None:
        self.obstacles = Obstacles(self.space)

    def resume(self) -> None:
        """Takes up what the study holds from an earlier call; what was running when that was killed comes in `explore`.

        Its trials count as if they had run now, except that they take none of the time.
        """
        self.trials = self.study.trials()
        self.earlier_trial_count = len(self.trials)
        for trial in self.trials:
            self.obstacles.learn_trial(trial)
            if trial.round is None:
                self.budget.spend_trial()
        for probe in self.study.probes():
            self._remember_probe(probe.kind, probe.config, probe.answer)

    def waive_margin(self) -> None:
        """From here on what runs without allocator retries fits, however little of the memory it leaves; so does what was
        refused for that before. The study keeps the margin that was asked for: a search that goes on comes to this again.
        """
        conditions = self.settings.conditions.model_copy(update={"memory_margin": 0.0})
        self.settings = self.settings.model_copy(update={"conditions": conditions})
        self.trials = [self._judged_again(trial) for trial in self.trials]
        self.obstacles = Obstacles(self.space)
        for trial in self.trials:
            self.obstacles.learn_trial(trial)
        for probe in self.study.probes():
            answer, memory = probe.answer, probe.answer.memory
            if memory is not None and self.runs(memory.memory):
                answer = answer.model_copy(update={"memory": memory.model_copy(update={"fits": True, "reason": ""})})
            self._remember_probe(probe.kind, probe.config, answer)

    def _judged_again(self, trial: Trial) -> Trial:
        """Without the margin, where that alone may have spoken against it."""
        failure = trial.failure
        if trial.measurement is None or failure is None or (failure.kind, failure.phase) != ("device_oom", "measure"):
            return trial
        return trial.model_copy(update={"failure": self._unfit(trial.measurement)})

    def runs(self, memory: MemoryMarks) -> bool:
        """Whether what took this memory ran without allocator retries, whatever it left."""
        return not misfit(memory, limit_bytes=self.memory_limit_bytes(), margin=0.0)

    @property
    def facts(self) -> SearchFacts:
        """Of the machine and of the workload."""
        return self.space.facts

    # --- measuring ---

    def measured(self, config: TrainingConfig) -> Trial | None:
        """The trial of this configuration outside the confirmation, if there is one."""
        return next((t for t in reversed(self.trials) if t.config == config and t.round is None), None)

    def obstacle(self, config: TrainingConfig) -> str | None:
        """Why this configuration is not worth running: a conflict, a size that is known not to fit, or wrong numerics."""
        return self.obstacles.reason(config, self.baseline)

    def measure(self, config: TrainingConfig, stage: Stage, *, incumbent: Trial | None = None) -> Trial:
        """Measures a configuration once: where that was done before, in this call or in an earlier one, that trial.

        What is clearly slower than the best so far is stopped early, but not where it may still beat the `incumbent` by
        `compute_score`, for stages that judge by that.
        """
        return self.measured(config) or self._run(config, stage, self._race(config, stage, incumbent))

    def measure_again(self, config: TrainingConfig, stage: Stage, *, confirm_round: int | None = None) -> Trial:
        """Runs one trial end to end, stores it and tells the sampler, whether or not it was measured before."""
        return self._run(config, stage, {}, confirm_round=confirm_round)

    def _race(self, config: TrainingConfig, stage: Stage, incumbent: Trial | None) -> dict[str, float]:
        """The fields of a request that say what the configuration has to beat; none for what others are compared with."""
        best = self.best()
        if best is None or stage == "baseline" or self.settings.objective == "memory":
            return {}
        rivals = [best] if incumbent is None else [best, incumbent]
        race = {"rate_to_beat": min(self.score(rival) for rival in rivals) / self.space.credit(config)}
        if incumbent is not None:
            race["resident_rate_to_beat"] = self.compute_score(incumbent)
        return race

    def _run(
        self, config: TrainingConfig, stage: Stage, race: Mapping[str, float], *, confirm_round: int | None = None
    ) -> Trial:
        confirms = confirm_round is not None
        number = self.study.begin(config)
        self.watcher.trial_started(number, self.told_changes(config), stage)
        self.watcher.time_left(self.budget.left())
        started_at = time.time()
        request = self._request("measure", config, confirm=confirms).model_copy(update={**race, "trial": number})
        answer = self.backend.run(request, self.watcher.phase)
        trial = Trial(
            number=number,
            stage=stage,
            config=config,
            measurement=answer.measurement,
            failure=answer.failure or self._unfit(answer.measurement),
            round=confirm_round,
            started_at=started_at,
            seconds=answer.seconds,
            machine_identity=self.facts.machine.identity,
        )
        self.stage_seconds[stage] += answer.seconds
        if not confirms:
            self.budget.spend_trial()
            trial = self._with_parity(trial)
        self._keep(trial)
        return trial

    def fail(self, trial: Trial, failure: Failure) -> None:
        """A trial that was measured turns out to fail: by wrong numerics, or when it ran on for longer."""
        failed = trial.model_copy(update={"failure": failure})
        self.trials[self.trials.index(trial)] = failed
        self.obstacles.learn_trial(failed)
        self.study.replace(failed)

    def _keep(self, trial: Trial) -> None:
        """Stores a finished trial and tells whoever watches."""
        self.study.finish(trial)
        self.trials.append(trial)
        self.obstacles.learn_trial(trial)
        best, freer = self.standing(), self.standing(free=True)
        ahead = best is not None and freer is not None and freer.speedup > best.speedup
        self.watcher.trial_finished(trial, best, freer if ahead else None)

    def _with_parity(self, trial: Trial) -> Trial:
        """A trial that would lead is checked before it leads: what is fast and wrong must not draw the search after it.

        One check for each way to compute a gradient is enough here; finalists are checked as they are. What does not
        lead is checked the first time that a value shows, so that no other trial is spent on one that trains wrong.
        """
        if trial.failure is not None or self.baseline is None:
            return trial
        if self.space.gradient_key(trial.config) in self.results().known_gradients():
            return trial
        best = self.best()
        leads = best is None or self.compute_score(trial) > self.compute_score(best)
        if not leads and not self._is_cheap_to_check(trial):
            return trial
        result = self.parity(trial.config)
        if isinstance(result, Failure):
            return trial.model_copy(update={"failure": result})
        return trial.model_copy(update={"parity": result, "failure": parity_failure(result)})

    def _is_cheap_to_check(self, trial: Trial) -> bool:
        """Whether the trial shows what no check has seen yet, without a compilation, and there is time."""
        if slow_to_start(trial.config) or self.budget.left() < trial.seconds:
            return False
        best = self.best()
        if best is not None and self.compute_score(trial) < OUT_OF_THE_RACE * self.compute_score(best):
            return False  # nothing will be built on it
        checked = [
            t for t in self.trials if t.parity is not None or (t.failure is not None and t.failure.phase == "parity")
        ]
        seen = {shown for other in checked for shown in self._gradient_changes(other.config)}
        return not self._gradient_changes(trial.config) <= seen

    def _gradient_changes(self, config: TrainingConfig) -> set[tuple[str, Value]]:
        """What makes the gradients come about in another way than the baseline's."""
        assert self.baseline is not None
        changes = set(self.space.memory_class(config)) - set(self.space.memory_class(self.baseline))
        more = self.space.micro_batches(config) > self.space.micro_batches(self.baseline)
        return changes | ({("micro-batches", True)} if more else set())

    def _unfit(self, measurement: Measurement | None) -> Failure | None:
        """A configuration that ran but thrashes, or did not leave the margin, does not count as fitting."""
        if measurement is None:
            return None
        reason = misfit(
            measurement.memory,
            limit_bytes=self.memory_limit_bytes(),
            margin=self.settings.conditions.memory_margin,
        )
        return Failure(kind="device_oom", phase="measure", message=reason) if reason else None

    def memory_limit_bytes(self) -> int | None:
        """What a trial may use: the limit that was asked for, or the card; on CPU only the former."""
        return limit_bytes(self.settings.conditions, self.facts.machine)

    # --- probes ---

    def probe(self, kind: TrialKind, config: TrainingConfig) -> TrialAnswer:
        """Asks a trial process something that is not told to the sampler; the same question is asked once."""
        assert kind in ("memory", "loader", "parity", "soak")
        known = self.probes.get((kind, config.key))
        if known is not None:
            return known
        started_at = time.time()
        self.watcher.time_left(self.budget.left())
        answer = self.backend.run(self._request(kind, config), self.watcher.phase)
        self.stage_seconds[kind] += answer.seconds
        self._remember_probe(kind, config, answer)
        self.study.add_probe(
            Probe(
                kind=kind,
                config=config,
                answer=answer,
                started_at=started_at,
                machine_identity=self.facts.machine.identity,
            )
        )
        return answer

    def parity(self, config: TrainingConfig) -> ParityResult | Failure:
        """What the parity check says of this configuration; loader knobs do not matter to it."""
        key = self.space.numerics_key(config)
        if key not in self.parity_results:
            self.probe("parity", config)
            result = self.parity_results[key]
            self.watcher.probe("parity", result.reason if isinstance(result, ParityResult) else result.message)
        return self.parity_results[key]

    def is_checked(self, config: TrainingConfig) -> bool:
        """Whether it is known what the parity check says: it was made, or only the loader differs from the baseline's."""
        assert self.baseline is not None
        key = self.space.numerics_key(config)
        return key in self.parity_results or key == self.space.numerics_key(self.baseline)

    def _remember_probe(self, kind: TrialKind, config: TrainingConfig, answer: TrialAnswer) -> None:
        self.probes[(kind, config.key)] = answer
        if kind in ("memory", "loader"):
            self.obstacles.learn_probe(kind, config, answer)
        elif kind == "parity":
            outcome = answer.parity or answer.failure
            assert outcome is not None
            if isinstance(outcome, Failure):
                # Whatever it failed of, memory included, says nothing of the configuration without its reference.
                message = f"it could not be checked: {outcome.message}"
                outcome = outcome.model_copy(update={"phase": "parity", "message": message})
            self.parity_results[self.space.numerics_key(config)] = outcome

    def _request(self, kind: TrialKind, config: TrainingConfig, *, confirm: bool = False) -> TrialRequest:
        request = trial_request(kind, config, confirm=confirm, space=self.space, settings=self.settings, pace=self.pace)
        reference = self.space.beside_own(self.changes_base)
        return request.model_copy(update={"reference": TrainingConfig(reference)}) if reference else request

    # --- judging ---

    def changes(self, config: TrainingConfig) -> Mapping[str, Value]:
        """The knobs in which a configuration differs from the baseline."""
        return config.changes_from(self.changes_base)

    def told_changes(self, config: TrainingConfig) -> Mapping[str, Value]:
        """The same for a person: where the baseline has more than the user's own settings, from these."""
        beside = self.space.beside_own(self.changes_base)
        return config.changes_from(self.space.baseline) if beside else self.changes(config)

    @property
    def changes_base(self) -> TrainingConfig:
        """What changes are counted from: the baseline, before it ran the one that is expected."""
        return self.baseline or self.space.baseline

    def allowed(self, config: TrainingConfig) -> bool:
        """Whether the configuration keeps the global batch that is held, if one is."""
        return self.space.holds(config, self.settings.conditions.global_batch_size)

    def score(self, trial: Trial) -> float:
        """What the search makes large: samples per second, as far as its knobs give it credit, or less peak memory."""
        assert trial.measurement is not None
        if self.settings.objective == "memory":
            return 1.0 / max(1, trial.measurement.memory.peak_allocated_bytes)
        return trial.measurement.samples_per_second * self.space.credit(trial.config)

    def compute_score(self, trial: Trial) -> float:
        """The same for the step alone, its loader left out, so that a slow loader hides no gain of the step."""
        assert trial.measurement is not None
        if self.settings.objective == "memory":
            return self.score(trial)
        return trial.measurement.resident_samples_per_second or trial.measurement.samples_per_second

    def candidates(self, *, free: bool = False) -> list[Trial]:
        """Measured trials of configurations that never failed, best first; those that keep the held batch unless
        `free`. One that was stopped early is none."""
        failed = {trial.config for trial in self.trials if trial.failure is not None}
        results = self.results() if self.baseline is not None else None
        usable = [
            trial
            for trial in self.trials
            if trial.measurement is not None
            and not trial.measurement.stopped_early
            and trial.failure is None
            and trial.round is None
            and (trial.config == self.baseline or trial.config not in failed)
            and (free or self.allowed(trial.config))
            and not (results is not None and results.saves_memory_for_nothing(trial.config))
        ]
        return sorted(usable, key=self.score, reverse=True)

    def best(self) -> Trial | None:
        """The best trial so far that keeps the held batch."""
        return next(iter(self.candidates()), None)

    def standing(self, *, free: bool = False) -> Standing | None:
        """The best so far, or `free` the best of those that leave the held batch, by what is known of it now."""
        base = self.baseline_trial()
        if base is None or base.measurement is None:
            return None
        results, usable = self.results(), self.candidates(free=free)
        beside = results.whose("your settings")
        if free:
            usable = [trial for trial in usable if not self.allowed(trial.config)]
        confirmed = [results.answer(t.config) for t in usable if results.round_pairs(t.config)]
        if any(answer.config != self.baseline for answer in confirmed):
            top = max(confirmed, key=results.gain)
            return Standing(samples_per_second=top.samples_per_second, speedup=top.speedup.value, beside=beside)
        first = next((trial.measurement for trial in usable if trial.measurement is not None), None)
        if first is None:
            return None
        rate = first.samples_per_second
        return Standing(samples_per_second=rate, speedup=rate / base.measurement.samples_per_second, beside=beside)

    def baseline_trial(self) -> Trial | None:
        """The baseline's own measurement, which it has once `baseline` is set."""
        return self.measured(self.baseline) if self.baseline is not None else None

    def results(self, *, unconfirmed: bool = False) -> Results:
        """What was measured so far, for whoever asks what is recommended. The baseline ran before."""
        assert self.baseline is not None
        return Results(
            trials=tuple(self.trials),
            baseline=self.baseline,
            parity_results=self.parity_results,
            space=self.space,
            settings=self.settings,
            misfits=self.obstacles.misfits(),
            unconfirmed=unconfirmed,
        )

    # --- time ---

    def hurry_if_short_of(self, seconds: float) -> None:
        """From here on measurements are short where less than so many seconds are left, and otherwise as the budget asked
        for: what was short so far may have been starting alone, which takes its time once."""
        usual = self.pace.unhurried or self.pace
        self.pace = hurried(usual) if self.budget.left() < seconds else usual

    def seconds_unhurried(self, trial: Trial) -> float:
        """How long a trial that just ran would take at the most if nobody hurried."""
        usual = self.pace.unhurried or self.pace
        more = usual.longest_seconds - self.pace.longest_seconds
        return trial.seconds + 2 * more  # end to end, and with batches that lie on the device

    def affords(self, config: TrainingConfig, *, gains_much: bool = False) -> bool:
        """Whether a trial of this configuration fits into what the budget leaves before its reserve."""
        return self.allows(self.expected_seconds(config), gains_much=gains_much)

    def allows(self, seconds: float, *, gains_much: bool = False) -> bool:
        """Whether a trial of so many seconds fits there; that one did not is remembered."""
        allowed = self.budget.allows(seconds, gains_much=gains_much)
        if not allowed:
            self.short_of = "trials" if self.budget.trials_left == 0 else "time"
        return allowed

    def expected_seconds(self, config: TrainingConfig) -> float:
        """How long a trial of this configuration is likely to take: as long as the last few of its kind that ran.

        A first compilation is not known to be short: it is granted what the compiler is seen to take on small models.
        """
        ran = [trial for trial in self.trials if trial.round is None and trial.measurement is not None]
        compiles = slow_to_start(config)
        if compiles and (same := [trial for trial in ran if self._compiles_alike(trial.config, config)]):
            # The compiler finds what it made for that trial.
            return min(map(self.seconds_again, same))
        alike = [self.seconds_at_pace(trial) for trial in ran if slow_to_start(trial.config) == compiles]
        if alike:
            return max(alike[-4:])
        others = max(map(self.seconds_at_pace, ran), default=UNKNOWN_TRIAL_SECONDS)
        first_compile = HURRIED_COMPILE_SECONDS if self.pace.hurried else FIRST_COMPILE_SECONDS
        return others + first_compile if compiles else others

    def seconds_at_pace(self, trial: Trial) -> float:
        """How long a trial would take by now: less than it did where its blocks were longer and more."""
        measured = trial.measurement
        if measured is None or not self.pace.hurried:
            return trial.seconds
        seconds = trial.seconds
        for blocks in filter(None, (measured.blocks, measured.resident_blocks)):
            step_seconds = sum(blocks.seconds) / sum(blocks.steps)
            most = self.pace.maximum_blocks * (self.pace.block_seconds + step_seconds)
            seconds -= max(0.0, sum(blocks.seconds) - most)
        return seconds

    def seconds_again(self, trial: Trial) -> float:
        """How long a trial takes when it is run again: what was compiled is found in the compiler's cache."""
        return trial.seconds - (1 - CACHED_SHARE[self.facts.device]) * _cold_start_seconds(trial)

    def start_seconds(self, trial: Trial) -> float:
        """What of that goes by beside its blocks."""
        measurement = trial.measurement
        assert measurement is not None
        resident = measurement.resident_blocks.seconds if measurement.resident_blocks is not None else ()
        again = self.seconds_again(trial) if slow_to_start(trial.config) else trial.seconds
        return max(0.0, again - sum(measurement.blocks.seconds) - sum(resident))

    def _compiles_alike(self, config: TrainingConfig, other: TrainingConfig) -> bool:
        """Whether forward and backward are the same: what differs is loading, or the optimizer's step."""
        return all(
            config[knob.name] == other[knob.name]
            for knob in KNOBS
            if knob.stage != "loader" and not knob.in_update_only
        )


def _cold_start_seconds(trial: Trial) -> float:
    """The first step of a trial where it was compiled in it, not found."""
    measurement = trial.measurement
    return 0.0 if measurement is None or measurement.compile_was_cached else measurement.first_step_seconds


def parity_failure(result: ParityResult) -> Failure | None:
    """The failure of a configuration that trains differently; None where it trains the same."""
    return None if result.passed else Failure(kind="numerics", phase="parity", message=result.reason)

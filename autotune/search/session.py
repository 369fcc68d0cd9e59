"""`Session`: what every stage of a search works with: run a trial, remember it, tell whoever watches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.config import TrainingConfig, Value
from autotune.knobs.registry import KNOBS
from autotune.records import (
    OUT_OF_MEMORY,
    Failure,
    Measurement,
    ParityResult,
    PhaseTimeouts,
    Probe,
    SearchFacts,
    Settings,
    Stage,
    Trial,
    TrialAnswer,
    TrialKind,
    TrialRequest,
)
from autotune.search.backend import TrialBackend
from autotune.search.budget import Budget
from autotune.search.study import Study
from autotune.search.watcher import SearchWatcher
from autotune.space import SearchSpace

WORTHWHILE_GAIN = 1.02
"""A configuration must be so many times better to be preferred to a simpler one (design, section 9)."""


FIRST_COMPILE_SECONDS = 15.0
"""A small model compiles in 10 to 20 s (two CPU cores, caches cold)."""


@dataclass(frozen=True)
class Pace:
    """How long each measurement takes; shorter in a short budget."""

    block_seconds: float = 0.3
    minimum_blocks: int = 3
    maximum_blocks: int = 6
    confirm_block_seconds: float = 1.0
    confirm_minimum_blocks: int = 6
    confirm_maximum_blocks: int = 12
    soak_seconds: float = 20.0


def pace_for(budget_seconds: float) -> Pace:
    """The design's block lengths where there is time for them; in less than four minutes, half-second blocks to confirm."""
    if budget_seconds >= 240:
        return Pace()
    return Pace(confirm_block_seconds=0.5, confirm_minimum_blocks=4, confirm_maximum_blocks=8, soak_seconds=8.0)


@dataclass
class Session:
    """One search in progress. Everything learnt is in `study`; the rest can be rebuilt from it."""

    backend: TrialBackend
    study: Study
    space: SearchSpace
    facts: SearchFacts
    settings: Settings
    budget: Budget
    watcher: SearchWatcher
    pace: Pace
    trials: list[Trial] = field(default_factory=list)
    probes: dict[tuple[str, str], TrialAnswer] = field(default_factory=dict)
    parity_results: dict[str, ParityResult | Failure] = field(default_factory=dict)
    """Numerics key to what the parity check said, or how it failed."""
    baseline: TrainingConfig | None = None
    """The configuration that everything is compared with, once it ran."""
    warnings: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """What was not tried, and why, in words."""

    def resume(self) -> None:
        """Takes up what the study holds from an earlier call; what was running when that was killed comes in `explore`."""
        self.trials = self.study.trials()
        for probe in self.study.probes():
            self.probes[(probe.kind, probe.config.key)] = probe.answer
            if probe.kind == "parity":
                self._remember_parity(probe.config, probe.answer)

    # --- measuring ---

    def measured(self, config: TrainingConfig) -> Trial | None:
        """The trial of this configuration outside the confirmation, if there is one."""
        return next((t for t in reversed(self.trials) if t.config == config and t.round is None), None)

    def obstacle(self, config: TrainingConfig) -> str | None:
        """Why this configuration is not worth running: a conflict, a size that is known not to fit, or wrong numerics."""
        conflict = self.space.conflict(config)
        if conflict is not None:
            return conflict
        too_large = self.smallest_out_of_memory(config)
        size = self.space.micro_batch(config)
        if too_large is not None and size >= too_large:
            return f"batch {too_large} ran out of memory with the same memory settings"
        blamed = self._blamed_numerics(config)
        if blamed is not None:
            return blamed
        return None

    def smallest_out_of_memory(self, config: TrainingConfig) -> int | None:
        """The smallest micro-batch that ran out of memory in a trial of the configuration's memory class."""
        memory_class = self.space.memory_class(config)
        failed = [
            self.space.micro_batch(trial.config)
            for trial in self.trials
            if trial.failure is not None
            and trial.failure.kind in OUT_OF_MEMORY
            and self.space.memory_class(trial.config) == memory_class
        ]
        return min(failed, default=None)

    def _blamed_numerics(self, config: TrainingConfig) -> str | None:
        """A failed parity check of a configuration that differs from the baseline in one numeric knob blames its value."""
        if self.baseline is None:
            return None
        for trial in self.trials:
            if trial.failure is None or trial.failure.kind != "numerics":
                continue
            changed = self._numeric_changes(trial.config)
            if changed and all(config[name] == value for name, value in changed.items()):
                return f"trains differently: {trial.failure.message}"
        return None

    def _numeric_changes(self, config: TrainingConfig) -> dict[str, Value]:
        assert self.baseline is not None
        numeric = {knob.name for knob in KNOBS if knob.stage != "loader"}
        return {name: config[name] for name in numeric if config[name] != self.baseline[name]}

    def measure(self, config: TrainingConfig, stage: Stage, *, confirm_round: int | None = None) -> Trial:
        """Runs one trial end to end, stores it and tells the sampler. Never the same point twice but to confirm."""
        earlier = self.measured(config) if confirm_round is None else None
        if earlier is not None:
            return earlier
        number = self.study.begin(config)
        self.watcher.trial_started(number, self.changes(config), stage)
        self.watcher.time_left(self.budget.left())
        started_at = time.time()
        answer = self.backend.run(
            self.request("measure", config, confirm=confirm_round is not None), self.watcher.phase
        )
        failure = answer.failure or self._unfit(answer.measurement)
        trial = Trial(
            number=number,
            stage=stage,
            config=config,
            measurement=answer.measurement,
            failure=failure,
            round=confirm_round,
            started_at=started_at,
            seconds=answer.seconds,
            machine_identity=self.facts.machine.identity,
        )
        if confirm_round is None:
            self.budget.spend_trial()
            trial = self._with_parity(trial)
        self.keep(trial)
        return trial

    def keep(self, trial: Trial) -> None:
        """Stores a finished trial and tells whoever watches."""
        self.study.finish(trial)
        self.trials.append(trial)
        best = self.best()
        base = self.baseline_rate()
        rate = best.measurement.samples_per_second if best and best.measurement else None
        self.watcher.trial_finished(trial, rate, rate / base if rate and base else None)

    def fail(self, trial: Trial, failure: Failure) -> None:
        """A trial that was measured turns out to fail: by wrong numerics, or when it ran on for longer."""
        self.replace(trial, trial.model_copy(update={"failure": failure}))

    def replace(self, old: Trial, new: Trial) -> None:
        """Stores a trial anew under its number."""
        self.trials[self.trials.index(old)] = new
        self.study.replace(new)

    def _with_parity(self, trial: Trial) -> Trial:
        """A trial that would lead is checked before it leads: what is fast and wrong must not draw the search after it.

        One check for each way to compute a gradient is enough here; finalists are checked as they are.
        """
        if trial.failure is not None or self.baseline is None:
            return trial
        best = self.best()
        known = {self._gradient_key(self.baseline)} | {
            self._gradient_key(other.config)
            for other in self.trials
            if other.parity is not None and other.parity.passed
        }
        behind = best is not None and self.compute_score(trial) <= self.compute_score(best)
        if behind or self._gradient_key(trial.config) in known:
            return trial
        result = self.parity(trial.config)
        if isinstance(result, Failure):
            return trial.model_copy(update={"failure": result})
        if result.passed:
            return trial.model_copy(update={"parity": result})
        failure = Failure(kind="numerics", phase="parity", message=result.reason)
        return trial.model_copy(update={"parity": result, "failure": failure})

    def _gradient_key(self, config: TrainingConfig) -> tuple[object, ...]:
        """Equal for configurations whose gradients come about in the same way: precision, recomputation, compilation, and
        as many micro-batches a step."""
        return (*self.space.memory_class(config), self.space.micro_batches(config))

    def _unfit(self, measurement: Measurement | None) -> Failure | None:
        """A configuration that ran but thrashes, or did not leave the margin, does not count as fitting."""
        if measurement is None:
            return None
        memory, conditions = measurement.memory, self.settings.conditions
        if memory.allocator_retries:
            return Failure(
                kind="device_oom",
                phase="measure",
                message=f"it ran, but only with {memory.allocator_retries} allocator retries: it does not really fit",
            )
        limit = self.memory_limit_bytes()
        if limit is None or memory.reserved_bytes is None:
            return None
        allowed = (1 - conditions.memory_margin) * limit
        if memory.reserved_bytes <= allowed:
            return None
        return Failure(
            kind="device_oom",
            phase="measure",
            message=f"it reserved {memory.reserved_bytes / 2**30:.2f} GiB and left less than the margin "
            f"({allowed / 2**30:.2f} GiB are usable)",
        )

    def memory_limit_bytes(self) -> int | None:
        """What a trial may use: the limit that was asked for, or the card; on CPU only the former."""
        asked = self.settings.conditions.memory_limit_bytes
        if self.facts.device == "cpu":
            return asked
        card = self.facts.machine.gpus[0].total_bytes
        return min(asked, card) if asked is not None else card

    # --- probes ---

    def probe(self, kind: TrialKind, config: TrainingConfig) -> TrialAnswer:
        """Asks a trial process something that is not told to the sampler; the same question is asked once."""
        assert kind in ("memory", "loader", "parity", "soak")
        known = self.probes.get((kind, config.key))
        if known is not None:
            return known
        started_at = time.time()
        self.watcher.time_left(self.budget.left())
        answer = self.backend.run(self.request(kind, config), self.watcher.phase)
        self.probes[(kind, config.key)] = answer
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
        key = self.numerics_key(config)
        if key not in self.parity_results:
            self._remember_parity(config, self.probe("parity", config))
            result = self.parity_results[key]
            self.watcher.probe("parity", result.reason if isinstance(result, ParityResult) else result.message)
        return self.parity_results[key]

    def _remember_parity(self, config: TrainingConfig, answer: TrialAnswer) -> None:
        outcome = answer.parity or answer.failure
        assert outcome is not None
        self.parity_results[self.numerics_key(config)] = outcome

    def numerics_key(self, config: TrainingConfig) -> str:
        """Equal for two configurations that compute the same numbers."""
        return self.space.numerics_key(config)

    # --- requests ---

    def request(self, kind: TrialKind, config: TrainingConfig, *, confirm: bool = False) -> TrialRequest:
        """The request for a trial, with blocks and timeouts that suit it."""
        pace = self.pace
        soak = kind == "soak"
        return TrialRequest(
            kind=kind,
            config=config,
            conditions=self.settings.conditions,
            blocks=self.facts.workload.blocks,
            block_seconds=pace.confirm_block_seconds if confirm else pace.block_seconds,
            minimum_blocks=pace.confirm_minimum_blocks if confirm else pace.minimum_blocks,
            maximum_blocks=(
                max(4, round(pace.soak_seconds / pace.block_seconds))
                if soak
                else pace.confirm_maximum_blocks
                if confirm
                else pace.maximum_blocks
            ),
            measure_resident=not confirm,
            timeouts=self._timeouts(config),
        )

    def _timeouts(self, config: TrainingConfig) -> PhaseTimeouts:
        """Twenty of the user's own steps scaled to this batch, and never so long that one hang takes the budget.

        Only where something may be compiled does the first step get minutes.
        """
        workload = self.facts.workload
        steps = self.space.effective_batch(config) / max(1, workload.batch_size)
        step_seconds = workload.step_seconds * max(1.0, steps)
        share = self.budget.seconds
        eager = min(max(15.0, 20 * step_seconds), max(15.0, share / 4))
        compiled = min(300.0, max(30.0, share / 4))
        compiles = self._slow_to_start(config) or workload.model_is_compiled
        return PhaseTimeouts(
            build_seconds=max(30.0, min(120.0, share / 4)),
            compile_seconds=compiled if compiles else eager,
            measure_seconds=max(30.0, min(240.0, eager + 40 * self.pace.confirm_block_seconds)),
        )

    # --- judging ---

    def changes(self, config: TrainingConfig) -> Mapping[str, Value]:
        """The knobs in which a configuration differs from the baseline."""
        base = self.baseline or self.space.baseline
        return {name: value for name, value in config.items() if value != base[name]}

    def allowed(self, config: TrainingConfig) -> bool:
        """Whether the configuration keeps the global batch that is held, if one is."""
        held = self.settings.conditions.global_batch_size
        return held is None or self.space.effective_batch(config) == held

    def score(self, trial: Trial) -> float:
        """What the search makes large: samples per second, or less peak memory."""
        assert trial.measurement is not None
        if self.settings.objective == "memory":
            return 1.0 / max(1, trial.measurement.memory.peak_allocated_bytes)
        return trial.measurement.samples_per_second

    def compute_score(self, trial: Trial) -> float:
        """The same for the step alone, its loader left out, so that a slow loader hides no gain of the step."""
        assert trial.measurement is not None
        if self.settings.objective == "memory":
            return self.score(trial)
        return trial.measurement.resident_samples_per_second or trial.measurement.samples_per_second

    def candidates(self, *, free: bool = False) -> list[Trial]:
        """Measured trials without a failure, best first; those that keep the held batch unless `free`."""
        usable = [
            trial
            for trial in self.trials
            if trial.measurement is not None
            and trial.failure is None
            and trial.round is None
            and (free or self.allowed(trial.config))
        ]
        return sorted(usable, key=self.score, reverse=True)

    def best(self) -> Trial | None:
        """The best trial so far that keeps the held batch."""
        return next(iter(self.candidates()), None)

    def baseline_trial(self) -> Trial | None:
        """The baseline's own measurement."""
        return self.measured(self.baseline) if self.baseline is not None else None

    def baseline_rate(self) -> float | None:
        """Samples per second of the baseline."""
        trial = self.baseline_trial()
        return trial.measurement.samples_per_second if trial and trial.measurement else None

    def affords(self, config: TrainingConfig) -> bool:
        """Whether a trial of this configuration fits into what the budget leaves before its reserve."""
        return self.budget.allows(self.expected_seconds(config))

    def expected_seconds(self, config: TrainingConfig) -> float:
        """How long a trial of this configuration is likely to take: as long as the last few of its kind.

        A first compilation is not known to be short: it is granted what the compiler is seen to take on small models.
        """
        compiles = self._slow_to_start(config)
        alike = [t for t in self.trials if t.round is None and self._slow_to_start(t.config) == compiles]
        if alike:
            return max(trial.seconds for trial in alike[-4:])
        others = max((trial.seconds for trial in self.trials), default=5.0)
        return others + FIRST_COMPILE_SECONDS if compiles else others

    def _slow_to_start(self, config: TrainingConfig) -> bool:
        return any(knob.slow_first_step(config[knob.name]) for knob in KNOBS)

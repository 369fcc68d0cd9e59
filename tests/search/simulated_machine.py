"""`SimulatedMachine`: a `TrialBackend` of closed formulas, with a clock of its own that moves only while a trial runs.

What a search decides can so be held against what is best by the formulas, over many seeds, in no time.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from autotune.config import TrainingConfig, Value
from autotune.knobs.registry import KNOBS
from autotune.records import (
    LONGEST_SOAK_SHARE,
    Blocks,
    Failure,
    FailureKind,
    LoaderProbe,
    Measurement,
    MemoryMarks,
    MemoryProbe,
    ParityResult,
    Phase,
    SearchFacts,
    SoakResult,
    TrialAnswer,
    TrialKind,
    TrialRequest,
)
from autotune.space import SearchSpace
from autotune.stats import OUT_OF_THE_RACE, out_of_the_race, rate

Pairs = Mapping[tuple[str, Value], float]
RESERVED_OVER_ALLOCATED = 1.05


@dataclass(frozen=True)
class Fault:
    """Configurations that have these values fail in trials of this kind, after so many that went well."""

    kind: TrialKind
    having: Mapping[str, Value]
    failure: FailureKind
    phase: Phase = "measure"
    after: int = 0


@dataclass(frozen=True)
class Program:
    """What a training step costs. Seconds and bytes; a pair of knob and value stands for a factor."""

    sample_seconds: float
    """Forward and backward of a sample."""
    launch_seconds: float = 0.0
    """No micro-batch is faster than that."""
    update_seconds: float = 0.0
    hidden_update_seconds: Pairs = field(default_factory=dict)
    """Of an update that is timed alone, what the device hides in a step that it holds back."""
    load_seconds: float = 0.0
    """To load a sample, in one process."""
    copy_seconds: float = 0.0
    """To bring a sample to the device, unless the loader pins."""
    sample_speedups: Pairs = field(default_factory=dict)
    launch_speedups: Pairs = field(default_factory=dict)
    update_speedups: Pairs = field(default_factory=dict)
    constant_bytes: int = 100 * 2**20
    constant_shares: Pairs = field(default_factory=dict)
    """Of `constant_bytes`, what a value leaves."""
    sample_bytes: int = 2**20
    memory_shares: Pairs = field(default_factory=dict)
    """Of `sample_bytes`, what a value leaves."""
    wrong: tuple[Mapping[str, Value], ...] = ()
    """Values with which gradients differ."""
    faults: tuple[Fault, ...] = ()
    compile_seconds: float = 20.0
    cached_share: float = 0.3
    """Of `compile_seconds`, where the compiler finds its output."""
    tuning_seconds: float = 0.0
    """To try algorithms of convolutions, in each first step."""
    start_seconds: float = 1.0
    """From the start of a trial's process to its first step, and to its end after the last block."""
    check_seconds: float = 2.0
    """What a parity check takes beside the candidate's first step."""
    state_seconds: float = 0.0
    """To save and load what training goes on from."""
    process_spread: float = 0.01
    """Standard deviation of the logarithm of the rate, from process to process."""
    block_spread: float = 0.01
    update_spread: float = 0.05
    """Of the update timed alone, from process to process."""

    def micro_batch_seconds(self, config: TrainingConfig) -> tuple[float, float]:
        """Of the device and of the host, which work side by side."""
        device = _size(config) * self.sample_seconds / _product(config, self.sample_speedups)
        return device, self.launch_seconds / _product(config, self.launch_speedups)

    def step_seconds(self, config: TrainingConfig, micro_batches: int) -> float:
        """On batches that lie ready."""
        update = self.update_seconds / _product(config, self.update_speedups)
        return micro_batches * max(self.micro_batch_seconds(config)) + update

    def update_share(self, config: TrainingConfig, micro_batches: int) -> float:
        """Of a step, what the optimizer's update takes where it is timed alone."""
        without = micro_batches * max(self.micro_batch_seconds(config))
        hidden = sum(more for (name, value), more in self.hidden_update_seconds.items() if config[name] == value)
        return 1 - without / (self.step_seconds(config, micro_batches) + hidden)

    def samples_per_second(self, config: TrainingConfig, micro_batches: int, cores: int) -> float:
        """End to end. Workers that have no core of their own take from the step."""
        samples = _size(config) * micro_batches
        workers = int(config["num_workers"])
        copy = 0.0 if config["pin_memory"] else samples * self.copy_seconds
        step = self.step_seconds(config, micro_batches) + copy
        loading = samples * self.load_seconds
        if workers == 0:
            return samples / (step + loading)
        crowded = max(0, workers + 1 - cores)
        return samples / max(step * (1 + 0.05 * crowded), loading / min(workers, cores))

    def peak_bytes(self, config: TrainingConfig) -> int:
        """Allocated, affine in the micro-batch."""
        share = math.prod(factor for (name, value), factor in self.memory_shares.items() if config[name] == value)
        constant = self.constant_bytes * _product(config, self.constant_shares)
        return int(constant + _size(config) * self.sample_bytes * share)

    def is_wrong(self, config: TrainingConfig) -> bool:
        """Whether it trains something else than the user's program does."""
        return any(_has(config, values) for values in self.wrong)


class SimulatedMachine:
    """Answers every kind of request as a real process would. `clock` is what a `Budget` takes.

    `interrupt_at` raises KeyboardInterrupt within the request of that number, counted from 0. `busy_once` are values and a
    share: the first measurement that has the values runs at that share of its rate, beside other work on the machine.
    """

    def __init__(self, program: Program, space: SearchSpace, *, seed: int = 0) -> None:
        self.program = program
        self.requests: list[TrialRequest] = []
        self.answers: list[TrialAnswer] = []
        self.now_seconds = 0.0
        self.interrupt_at: int | None = None
        self.busy_once: tuple[Mapping[str, Value], float] | None = None
        self._space = space
        self._seed = seed
        self._compiled: set[str] = set()
        self._most_samples: dict[str, int] = {}
        """By configuration, that one process has trained on."""

    def clock(self) -> float:
        """Seconds since the machine was switched on."""
        return self.now_seconds

    def asked(self, kind: TrialKind) -> list[TrainingConfig]:
        """The configurations of all requests of a kind, in their order."""
        return [request.config for request in self.requests if request.kind == kind]

    def true_rate(self, config: TrainingConfig) -> float:
        """Samples per second without noise."""
        return self.program.samples_per_second(config, self._micro_batches(config), self._facts.machine.usable_cores)

    def usable(self, config: TrainingConfig, limit_bytes: int | None) -> bool:
        """Whether it runs within the limit, trains the same and survives."""
        program = self.program
        if self._space.conflict(config) is not None or program.is_wrong(config):
            return False
        if limit_bytes is not None and RESERVED_OVER_ALLOCATED * program.peak_bytes(config) > 0.95 * limit_bytes:
            return False
        return not any(_has(config, fault.having) for fault in program.faults)

    def close(self) -> None:
        """Nothing runs."""

    def run(self, request: TrialRequest, on_phase: Callable[[Phase], None] | None = None) -> TrialAnswer:
        """The answer, after which the clock stands where the trial would have ended."""
        number = len(self.requests)
        self.requests.append(request)
        if self.interrupt_at == number:
            raise KeyboardInterrupt
        assert self._space.conflict(request.config) is None, f"asked to run {request.config}, which conflicts"
        if on_phase is not None:
            on_phase("measure")
        answer = self._failed(request) or self._answered(request, random.Random(f"{self._seed} {number}"))
        self.now_seconds += answer.seconds
        self.answers.append(answer)
        return answer

    # --- inside ---

    @property
    def _facts(self) -> SearchFacts:
        return self._space.facts

    def _micro_batches(self, config: TrainingConfig) -> int:
        return self._space.micro_batches(config)

    def _limit_bytes(self, request: TrialRequest) -> int | None:
        asked = request.conditions.memory_limit_bytes
        card = self._facts.machine.gpus[0].total_bytes if self._facts.device == "cuda" else asked
        return card if asked is None or card is None else min(asked, card)

    def _failed(self, request: TrialRequest) -> TrialAnswer | None:
        config, limit = request.config, self._limit_bytes(request)
        peak = self.program.peak_bytes(config)
        if limit is not None and peak > limit:
            kind: FailureKind = "device_oom" if self._facts.device == "cuda" else "host_oom"
            message = f"{peak / 2**30:.2f} GiB do not fit into {limit / 2**30:.2f} GiB"
            return TrialAnswer(failure=Failure(kind=kind, phase="compile", message=message), seconds=1.5)
        for fault in self.program.faults:
            earlier = sum(r.config == config and r.kind == request.kind for r in self.requests) - 1
            if fault.kind == request.kind and _has(config, fault.having) and earlier >= fault.after:
                failure = Failure(kind=fault.failure, phase=fault.phase, message=f"it fails with {dict(fault.having)}")
                hangs = fault.failure == "timeout"
                return TrialAnswer(failure=failure, seconds=request.timeouts.compile_seconds if hangs else 2.0)
        return None

    def _answered(self, request: TrialRequest, noise: random.Random) -> TrialAnswer:
        match request.kind:
            case "measure":
                measurement = self._measured(request, noise)
                measuring = sum(measurement.blocks.seconds) * (2.0 if measurement.resident_blocks else 1.0)
                return TrialAnswer(measurement=measurement, seconds=measurement.process_seconds + measuring)
            case "memory":
                return self._probed_memory(request)
            case "loader":
                return self._probed_loader(request, noise)
            case "parity":
                return TrialAnswer(
                    parity=self._compared(request.config),
                    seconds=self.program.check_seconds + self._first_step(request.config),
                )
            case "soak":
                seconds = request.block_seconds * request.maximum_blocks
                pace = self.true_rate(request.config)
                soak = SoakResult(
                    steps=400, samples_per_second=pace, last_samples_per_second=pace, growth_bytes_per_step=0.0,
                    allocator_retries=0,
                )  # fmt: skip
                beside = self.program.start_seconds + self._first_step(request.config) + self.program.state_seconds
                run = self._run_seconds(request.config, seconds) + self._soak_compile_seconds(request.config)
                return TrialAnswer(soak=soak, seconds=beside + run)
        raise AssertionError(f"a search asks for no {request.kind}")

    def _run_seconds(self, config: TrainingConfig, asked_seconds: float) -> float:
        """Of a soak: to the end of a pass where that is near."""
        length = self._facts.workload.dataset_length
        in_pass = math.inf if length is None else length / self.true_rate(config)
        return max(asked_seconds, min(in_pass, LONGEST_SOAK_SHARE * asked_seconds))

    def _soak_compile_seconds(self, config: TrainingConfig) -> float:
        """For an evaluation through a compiled model, and for a shorter last batch that no trial has come to."""
        if not self._compiles(config):
            return 0.0
        length = self._facts.workload.dataset_length
        comes_new = length is not None and length % _size(config) and self._most_samples.get(config.key, 0) < length
        share = (0.35 if config["compile_scope"] != "step" else 0.0) + (1.3 if comes_new else 0.0)
        return share * self.program.compile_seconds

    def _measured(self, request: TrialRequest, noise: random.Random) -> Measurement:
        config = request.config
        micro_batches = self._micro_batches(config)
        process = math.exp(noise.gauss(0, self.program.process_spread))
        if self.busy_once is not None and _has(config, self.busy_once[0]):
            process *= self.busy_once[1]
            self.busy_once = None
        blocks = self._blocks(request, self.true_rate(config) * process, noise)
        value, interval = rate(blocks.samples, blocks.seconds)
        device, host = self.program.micro_batch_seconds(config)
        self._most_samples[config.key] = max(self._most_samples.get(config.key, 0), sum(blocks.samples))
        was_cached = self._compiles(config) and self._compile_key(config) in self._compiled
        first_step = self._first_step(config)
        resident_rate = _size(config) * micro_batches / self.program.step_seconds(config, micro_batches) * process
        beaten = out_of_the_race(blocks.samples, blocks.seconds, request.rate_to_beat)
        resident = request.measure_resident and not (beaten and request.resident_rate_to_beat is None)
        still_rival = resident and resident_rate >= OUT_OF_THE_RACE * (request.resident_rate_to_beat or 0.0)
        return Measurement(
            samples_per_second=value,
            interval=interval,
            blocks=blocks,
            resident_samples_per_second=resident_rate if resident else None,
            resident_blocks=_at_pace(blocks, resident_rate) if resident else None,
            memory=self._marks(config),
            micro_batch_size=_size(config),
            micro_batches_per_step=micro_batches,
            warmup_steps=3,
            build_seconds=0.5,
            first_step_seconds=first_step,
            process_seconds=self.program.start_seconds + first_step,
            compiled_graphs=int(self._compiles(config)),
            compile_was_cached=was_cached,
            device_lag_share=max(0.0, 1 - host / device) if self._facts.device == "cuda" else None,
            update_share=self._update_share(config, micro_batches) if resident else None,
            stopped_early=beaten and not still_rival,
        )

    def _update_share(self, config: TrainingConfig, micro_batches: int) -> float:
        noise = random.Random(f"{self._seed} {len(self.requests)} update").gauss(0, self.program.update_spread)
        share = self.program.update_share(config, micro_batches)
        return share * math.exp(noise) / (share * math.exp(noise) + 1 - share)

    def _blocks(self, request: TrialRequest, true_rate: float, noise: random.Random) -> Blocks:
        """Until the interval is as narrow as was asked for, or there are as many as allowed."""
        samples = self._space.effective_batch(request.config)
        steps = max(1, math.ceil(request.block_seconds * true_rate / samples))
        seconds: list[float] = []
        while len(seconds) < request.maximum_blocks:
            seconds.append(steps * samples / true_rate * math.exp(noise.gauss(0, self.program.block_spread)))
            if len(seconds) >= request.minimum_blocks:
                value, (low, high) = rate([steps * samples] * len(seconds), seconds)
                precise = (high - low) / 2 <= request.relative_precision * value
                if precise or out_of_the_race([steps * samples] * len(seconds), seconds, request.rate_to_beat):
                    break
        count = len(seconds)
        return Blocks(seconds=tuple(seconds), samples=(steps * samples,) * count, steps=(steps,) * count)

    def _marks(self, config: TrainingConfig) -> MemoryMarks:
        peak = self.program.peak_bytes(config)
        reserved = int(RESERVED_OVER_ALLOCATED * peak) if self._facts.device == "cuda" else None
        return MemoryMarks(peak_allocated_bytes=peak, reserved_bytes=reserved)

    def _probed_memory(self, request: TrialRequest) -> TrialAnswer:
        config, limit, marks = request.config, self._limit_bytes(request), self._marks(request.config)
        step = self.program.step_seconds(config, self._micro_batches(config))
        usable = None if limit is None else (1 - request.conditions.memory_margin) * limit
        fits = usable is None or (marks.reserved_bytes or marks.peak_allocated_bytes) <= usable
        probe = MemoryProbe(
            micro_batch_size=_size(config), memory=marks, limit_bytes=limit, fits=fits,
            reason="" if fits else "it left no margin", step_seconds=step,
        )  # fmt: skip
        return TrialAnswer(memory=probe, seconds=self.program.start_seconds + self._first_step(config) + 4 * step)

    def _probed_loader(self, request: TrialRequest, noise: random.Random) -> TrialAnswer:
        workers = int(request.config["num_workers"])
        pace = max(1, workers) / max(self.program.load_seconds, 1e-6)
        blocks = self._blocks(request, pace, noise)
        probe = LoaderProbe(
            num_workers=workers, micro_batch_size=_size(request.config),
            samples_per_second=rate(blocks.samples, blocks.seconds)[0], blocks=blocks,
        )  # fmt: skip
        return TrialAnswer(loader=probe, seconds=1.0 + sum(blocks.seconds))

    def _compared(self, config: TrainingConfig) -> ParityResult:
        wrong = self.program.is_wrong(config)
        return ParityResult(
            passed=not wrong, reason="the gradient is 40 % off" if wrong else "the same but for rounding",
            relative_error=0.4 if wrong else 0.001, cosine=0.9 if wrong else 1.0, floor=0.001, tolerance=0.003,
            reference_losses=(2.0, 1.9), candidate_losses=(2.0, 1.9), micro_batch_size=_size(config),
            micro_batches_per_step=self._micro_batches(config),
        )  # fmt: skip

    def _compiles(self, config: TrainingConfig) -> bool:
        return config["compile_mode"] != "as_is"

    def _compile_key(self, config: TrainingConfig) -> str:
        """Equal where the compiler makes the same of forward and backward."""
        elsewhere: dict[str, Value] = {"num_workers": 0, "pin_memory": False, "optimizer_impl": "as_is"}
        return config.replace({**elsewhere, "cudnn_benchmark": "as_is"}).key

    def _first_step(self, config: TrainingConfig) -> float:
        """Seconds; a forward and backward that was compiled once lies in the compiler's cache."""
        step = self.program.step_seconds(config, self._micro_batches(config))
        step += self.program.tuning_seconds if config["cudnn_benchmark"] == "on" else 0.0
        if not self._compiles(config):
            return step
        cold = self._compile_key(config) not in self._compiled
        self._compiled.add(self._compile_key(config))
        return step + self.program.compile_seconds * (1.0 if cold else self.program.cached_share)


def _at_pace(blocks: Blocks, samples_per_second: float) -> Blocks:
    """Blocks that take as long, with as much in them as that pace gives."""
    pace = samples_per_second * sum(blocks.seconds) / sum(blocks.samples)
    return Blocks(
        seconds=blocks.seconds,
        samples=tuple(max(1, round(pace * samples)) for samples in blocks.samples),
        steps=tuple(max(1, round(pace * steps)) for steps in blocks.steps),
    )


def true_optimum(
    machine: SimulatedMachine, space: SearchSpace, *, held: int | None, limit_bytes: int | None
) -> tuple[TrainingConfig, float]:
    """The fastest configuration of the space that runs, trains the same and keeps the batch, with its rate.

    No loader makes a step faster than it is on batches that lie ready, so only the best steps need all loaders.
    """
    loaders = [knob.name for knob in KNOBS if knob.stage == "loader"]
    steps = [
        (space.effective_batch(config) / machine.program.step_seconds(config, space.micro_batches(config)), config)
        for config in _points(space, {name: values for name, values in space.choices.items() if name not in loaders})
        if held is None or space.effective_batch(config) == held
    ]
    best, best_rate = space.baseline, 0.0
    for resident_rate, step in sorted(steps, key=lambda pair: -pair[0]):
        if resident_rate <= best_rate:
            break
        for values in itertools.product(*(space.choices[name] for name in loaders)):
            config = step.replace(dict(zip(loaders, values, strict=True)))
            if machine.usable(config, limit_bytes) and machine.true_rate(config) > best_rate:
                best, best_rate = config, machine.true_rate(config)
    return best, best_rate


def _points(space: SearchSpace, choices: Mapping[str, tuple[Value, ...]]) -> Iterable[TrainingConfig]:
    for values in itertools.product(*choices.values()):
        config = space.start.replace(dict(zip(choices, values, strict=True)))
        if space.conflict(config) is None:
            yield config


def _size(config: TrainingConfig) -> int:
    return int(config["batch_size"])


def _has(config: TrainingConfig, values: Mapping[str, Value]) -> bool:
    return all(config[name] == value for name, value in values.items())


def _product(config: TrainingConfig, factors: Pairs) -> float:
    return math.prod(factor for (name, value), factor in factors.items() if config[name] == value)

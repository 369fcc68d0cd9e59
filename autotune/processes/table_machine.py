"""`TableMachine`: a `TrialBackend` that answers from a recorded table, noise included, on a clock of its own."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable

from autotune.config import TrainingConfig
from autotune.knobs.registry import KNOBS, batch_knob, slow_to_start
from autotune.memory_margin import limit_bytes, misfit
from autotune.processes.table import Table, TableSpace
from autotune.records import (
    Blocks,
    LoaderProbe,
    Measurement,
    MemoryProbe,
    Phase,
    SoakResult,
    TrialAnswer,
    TrialKind,
    TrialRequest,
)
from autotune.stats import is_precise, out_of_the_race, rate

PROBE_STEPS = 4
"""Of a memory probe, its first step among them."""


class TableHole(LookupError):  # noqa: N818  # a hole is what it is
    """Something was asked that the table does not hold; the text says what."""


class TableMachine:
    """Answers every request of a search as the recorded machine did, and knows nothing else.

    - **Measurements** are drawn from the recorded ones: a process where a point ran in several, and then its blocks, with
      replacement, put together until they are as long as was asked for. Where they are whole passes over the data, whole
      passes are drawn, or what happens at the end of one would come more or less often. A point that failed fails.
    - **Memory probes** tell what the measurement of the same point took, so a search may ask for the table's points only
      (`TableSpace.probe_sizes`).
    - **Loader probes** were recorded for every loader that a search may ask about. Their blocks are drawn too.
    - **Parity** is that of the same computation where it was recorded, else of one whose gradients come about in the same
      way, as a search itself takes one check for all of them.
    - **Soaks** run on drawn blocks of the measurement: they find what that shows, and nothing else.

    `clock` is what a `Budget` takes; it moves by what each answer took. The first of the trials that compile the same
    pays what the dearest of them paid when the table was recorded, the later ones what the cheapest did.

    The same seed and the same requests give the same answers. Raises `TableHole` where there is none.
    """

    def __init__(self, table: Table, space: TableSpace, *, seed: int) -> None:
        self.requests: list[TrialRequest] = []
        self.now_seconds = 0.0
        self._head = table.head
        self._space = space
        self._dice = random.Random(seed)
        self._compiled: set[tuple[object, ...]] = set()
        self._answers: dict[tuple[object, ...], list[TrialAnswer]] = defaultdict(list)
        self._first_steps: dict[tuple[object, ...], list[float]] = defaultdict(list)
        for trial in table.trials:
            for key in self._keys(trial.kind, trial.config):
                self._answers[key].append(trial.answer)
            if trial.answer.measurement is not None:
                self._first_steps[_graph(trial.config)].append(trial.answer.measurement.first_step_seconds)

    def clock(self) -> float:
        """Seconds since the replay began."""
        return self.now_seconds

    def close(self) -> None:
        """Nothing runs."""

    def run(self, request: TrialRequest, on_phase: Callable[[Phase], None] | None = None) -> TrialAnswer:
        """The answer, after which the clock stands where the trial would have ended."""
        assert request.conditions == self._head.conditions, "the table was recorded under other conditions"
        self.requests.append(request)
        if on_phase is not None:
            on_phase("measure")
        answer = self._answered(request)
        self.now_seconds += answer.seconds
        return answer

    def true_rates(self) -> dict[TrainingConfig, float]:
        """Samples per second of every point that ran, fits and trains the same, over all that was recorded of it."""
        found = {}
        for config in self._space.points:
            measured = [answer.measurement for answer in self._recorded("measure", config)]
            ran = [one for one in measured if one is not None and not self._misfit(one)]
            if len(ran) == len(measured) and self._trains_the_same(config):
                samples = sum(sum(one.blocks.samples) for one in ran)
                found[config] = samples / sum(sum(one.blocks.seconds) for one in ran)
        return found

    # --- what was recorded ---

    def _keys(self, kind: TrialKind, config: TrainingConfig) -> tuple[tuple[object, ...], ...]:
        """Under what an answer is looked for, the nearest first."""
        if kind == "loader":
            return ((kind, _loader(config)),)
        if kind == "parity":
            return (kind, self._space.numerics_key(config)), (kind, self._space.gradient_key(config))
        return ((kind, config),)

    def _drawn(self, kind: TrialKind, config: TrainingConfig) -> TrialAnswer:
        return self._dice.choice(self._recorded(kind, config))

    def _recorded(self, kind: TrialKind, config: TrainingConfig) -> list[TrialAnswer]:
        for key in self._keys(kind, config):
            if key in self._answers:
                return self._answers[key]
        raise TableHole(f"the table {self._head.name} has no record of a {kind} trial of {dict(config)}")

    def _trains_the_same(self, config: TrainingConfig) -> bool:
        if self._space.numerics_key(config) == self._space.numerics_key(self._space.baseline):
            return True
        return all(answer.parity is not None and answer.parity.passed for answer in self._recorded("parity", config))

    def _misfit(self, measurement: Measurement) -> str:
        margin = self._head.conditions.memory_margin
        return misfit(measurement.memory, limit_bytes=self._limit_bytes(), margin=margin)

    def _limit_bytes(self) -> int | None:
        return limit_bytes(self._head.conditions, self._head.machine)

    # --- answers ---

    def _answered(self, request: TrialRequest) -> TrialAnswer:
        if request.kind == "parity":
            return self._drawn("parity", request.config)
        if request.kind == "loader":
            return self._loaded(request, self._drawn("loader", request.config))
        recorded = self._drawn("measure", request.config)
        if recorded.measurement is None:
            return recorded
        start_seconds, first_step_seconds = self._start(request.config, recorded)
        match request.kind:
            case "measure":
                return self._measured(request, recorded.measurement, start_seconds, first_step_seconds)
            case "memory":
                return self._probed(recorded.measurement, start_seconds)
            case "soak":
                return self._soaked(request, recorded.measurement, start_seconds)
        raise TableHole(f"the table {self._head.name} answers no {request.kind}")

    def _measured(
        self, request: TrialRequest, recorded: Measurement, start_seconds: float, first_step_seconds: float
    ) -> TrialAnswer:
        """As `autotune.measurement.measure` measures: until it is precise enough, or seen to be out of the race."""
        blocks = self._blocks(request, recorded.blocks, self._steps_in_pass(request.config))
        beaten = out_of_the_race(blocks.samples, blocks.seconds, request.rate_to_beat)
        resident = None
        if request.measure_resident and not (beaten and request.resident_rate_to_beat is None):
            resident = self._resident_blocks(request, recorded)
        still_rival = resident is not None and not out_of_the_race(
            resident.samples, resident.seconds, request.resident_rate_to_beat
        )
        value, interval = rate(blocks.samples, blocks.seconds)
        resident_rate = None if resident is None else rate(resident.samples, resident.seconds)
        weight = rate(blocks.weights, blocks.seconds) if blocks.weights and min(blocks.weights) > 0 else None
        measurement = recorded.model_copy(
            update={
                "samples_per_second": value,
                "interval": interval,
                "blocks": blocks,
                "weight_per_second": weight[0] if weight else None,
                "weight_interval": weight[1] if weight else None,
                "resident_samples_per_second": resident_rate[0] if resident_rate else None,
                "resident_interval": resident_rate[1] if resident_rate else None,
                "resident_blocks": resident,
                "first_step_seconds": first_step_seconds,
                "process_seconds": recorded.process_seconds - recorded.first_step_seconds + first_step_seconds,
                "device_lag_share": recorded.device_lag_share if still_rival else None,
                "update_share": recorded.update_share if still_rival else None,
                "stopped_early": beaten and not still_rival,
                "spent": None,
            }
        )
        timed = sum(blocks.seconds) + (sum(resident.seconds) if resident else 0.0)
        untimed = _untimed_seconds(recorded.blocks, request.block_seconds, resident is not None)
        return TrialAnswer(measurement=measurement, seconds=start_seconds + untimed + timed)

    def _probed(self, recorded: Measurement, start_seconds: float) -> TrialAnswer:
        reason = self._misfit(recorded)
        step_seconds = _step_seconds(recorded.blocks)
        probe = MemoryProbe(
            micro_batch_size=recorded.micro_batch_size,
            memory=recorded.memory,
            limit_bytes=self._limit_bytes(),
            fits=not reason,
            reason=reason,
            step_seconds=step_seconds,
        )
        return TrialAnswer(memory=probe, seconds=start_seconds + (PROBE_STEPS - 1) * step_seconds)

    def _loaded(self, request: TrialRequest, recorded: TrialAnswer) -> TrialAnswer:
        if recorded.loader is None:
            return recorded
        blocks = self._blocks(request, recorded.loader.blocks)
        value, interval = rate(blocks.samples, blocks.seconds)
        probe: LoaderProbe = recorded.loader.model_copy(
            update={"samples_per_second": value, "interval": interval, "blocks": blocks}
        )
        start_seconds = recorded.seconds - sum(recorded.loader.blocks.seconds)
        return TrialAnswer(loader=probe, seconds=max(0.0, start_seconds) + sum(blocks.seconds))

    def _soaked(self, request: TrialRequest, recorded: Measurement, start_seconds: float) -> TrialAnswer:
        drawn = [self._block(recorded.blocks, request.block_seconds) for _ in range(request.maximum_blocks)]
        blocks = _joined(drawn)
        value, interval = rate(blocks.samples, blocks.seconds)
        last = _joined(drawn[-max(1, len(drawn) // 3) :])
        soak = SoakResult(
            steps=sum(blocks.steps),
            samples_per_second=value,
            interval=interval,
            block_count=len(drawn),
            growth_bytes_per_step=recorded.memory.growth_bytes_per_step,
            allocator_retries=recorded.memory.allocator_retries,
            last_samples_per_second=rate(last.samples, last.seconds)[0],
        )
        return TrialAnswer(soak=soak, seconds=start_seconds + sum(blocks.seconds))

    # --- drawing ---

    def _blocks(self, request: TrialRequest, recorded: Blocks, steps_in_pass: int | None = None) -> Blocks:
        passes = _passes(recorded, steps_in_pass)
        drawn: list[Blocks] = []
        while len(drawn) < request.maximum_blocks:
            if passes:
                drawn += _put_together(self._dice.choice(passes), request.block_seconds)
            else:
                drawn.append(self._block(recorded, request.block_seconds))
            if len(drawn) >= request.minimum_blocks:
                blocks = _joined(drawn)
                precise = is_precise(blocks.samples, blocks.seconds, request.relative_precision)
                if precise or out_of_the_race(blocks.samples, blocks.seconds, request.rate_to_beat):
                    break
        return _joined(drawn)

    def _resident_blocks(self, request: TrialRequest, recorded: Measurement) -> Blocks | None:
        if recorded.resident_blocks is None:
            return None
        count = max(1, request.minimum_blocks - 1)  # the first of them only sets the pace
        return _joined([self._block(recorded.resident_blocks, request.block_seconds) for _ in range(count)])

    def _block(self, recorded: Blocks, seconds: float) -> Blocks:
        """One block of at least so many seconds, of recorded ones."""
        count = len(recorded.seconds)
        parts = math.ceil(seconds / (sum(recorded.seconds) / count) - 0.05)
        drawn = self._dice.choices(range(count), k=max(1, parts))
        return _sum(_joined(_part(recorded, slice(index, index + 1)) for index in drawn))

    def _steps_in_pass(self, config: TrainingConfig) -> int | None:
        workload = self._head.workload
        if workload.dataset_length is None:
            return None
        steps = workload.dataset_length / self._space.effective_batch(config)
        return math.floor(steps) if workload.drop_last else math.ceil(steps)

    # --- seconds ---

    def _start(self, config: TrainingConfig, recorded: TrialAnswer) -> tuple[float, float]:
        """Seconds that a trial took beside what it timed, and those of its first step among them."""
        measured = recorded.measurement
        assert measured is not None
        resident = measured.resident_blocks.seconds if measured.resident_blocks is not None else ()
        untimed = _untimed_seconds(measured.blocks, self._head.block_seconds, bool(resident))
        rest = max(0.0, recorded.seconds - sum(measured.blocks.seconds) - sum(resident) - untimed)
        first = self._first_step_seconds(config, measured.first_step_seconds)
        return max(first, rest - measured.first_step_seconds + first), first

    def _first_step_seconds(self, config: TrainingConfig, recorded: float) -> float:
        if not slow_to_start(config):
            return recorded
        graph = _graph(config)
        known = graph in self._compiled
        self._compiled.add(graph)
        return min(self._first_steps[graph]) if known else max(self._first_steps[graph])


def _untimed_seconds(blocks: Blocks, block_seconds: float, resident: bool) -> float:
    """What a measurement runs and does not time: two half blocks to warm up, and one and a half on resident batches."""
    step_seconds = _step_seconds(blocks)
    block = max(1, math.ceil(block_seconds / step_seconds)) * step_seconds
    return 2.5 * block if resident else block


def _step_seconds(blocks: Blocks) -> float:
    return sum(blocks.seconds) / sum(blocks.steps)


def _joined(parts: Iterable[Blocks]) -> Blocks:
    """Blocks one after the other."""
    several = list(parts)
    return Blocks(
        seconds=tuple(one for part in several for one in part.seconds),
        samples=tuple(one for part in several for one in part.samples),
        steps=tuple(one for part in several for one in part.steps),
        weights=tuple(one for part in several for one in part.weights),
    )


def _passes(recorded: Blocks, steps_in_pass: int | None) -> list[Blocks]:
    """Each pass over the data by itself, where the blocks were cut so that they make up whole ones; else nothing."""
    found: list[Blocks] = []
    first = steps = 0
    for index, count in enumerate(recorded.steps):
        steps += count
        if steps == steps_in_pass:
            found.append(_part(recorded, slice(first, index + 1)))
            first, steps = index + 1, 0
    return found if steps == 0 else []


def _put_together(one_pass: Blocks, seconds: float) -> list[Blocks]:
    """A pass as blocks that are at least so many seconds long, where it is so long itself."""
    found: list[Blocks] = []
    first = 0
    for index in range(len(one_pass.seconds)):
        if sum(one_pass.seconds[first : index + 1]) >= seconds <= sum(one_pass.seconds[index + 1 :]):
            found.append(_sum(_part(one_pass, slice(first, index + 1))))
            first = index + 1
    return [*found, _sum(_part(one_pass, slice(first, None)))]


def _part(blocks: Blocks, which: slice) -> Blocks:
    return Blocks(**{name: values[which] for name, values in blocks})


def _sum(blocks: Blocks) -> Blocks:
    """All of them as one."""
    return Blocks(**{name: (sum(values),) if values else () for name, values in blocks})


def _graph(config: TrainingConfig) -> tuple[object, ...]:
    """Equal for configurations whose forward, loss and backward are the same, which is what a compiler sees."""
    return tuple(config[knob.name] for knob in KNOBS if knob.stage != "loader" and not knob.in_update_only)


def _loader(config: TrainingConfig) -> tuple[object, ...]:
    """What the pace of a loader depends on."""
    names = [batch_knob().name, *(knob.name for knob in KNOBS if knob.stage == "loader")]
    return tuple(config[name] for name in names)

"""Predicts each recorded peak of memory from those of two other batch sizes, as the search for ceilings does.

    python benchmarks/memory_backtest.py [FILE ...] [--out DIR]

The files are recorded trials (`.jsonl`) and tables (`.jsonl.gz`), by default all of a GPU in `tests/data`. Trials and probes
count together where the program and every knob that changes memory are the same, save the batch; where CUDA graphs hide what
is allocated, reserved bytes are predicted. A peak is `max(constants, a + b * batch)`: the optimizer's own peak is the
constant, and a line goes through the peaks of forward and backward of two batches, the largest of those below where there
are two of them.

Prints a table and writes `DIR/memory_backtest.json`. Takes seconds and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.config import Value
from autotune.knobs.batch_size import micro_batches_per_step
from autotune.knobs.compile_mode import CUDA_GRAPHS
from autotune.knobs.registry import KNOBS, batch_knob
from autotune.processes.replay import RecordedTrial, read_trials
from autotune.processes.table import read_table
from autotune.records import MemoryMarks, WorkloadFacts
from autotune.search.ceiling import APART, bytes_per_sample

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
FEWEST_SIZES = 3
MEAN_PROMISE = 0.01
P95_PROMISE = 0.03

MemoryClass = tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class Peak:
    """What one batch size takes."""

    rising_bytes: int
    """The peak of forward and backward, which grows with the batch."""
    constant_bytes: int
    """The peak of the optimizer's step, which does not."""

    @property
    def bytes(self) -> int:
        return max(self.rising_bytes, self.constant_bytes)


@dataclass(frozen=True)
class Prediction:
    """One recorded peak beside what two others say of it."""

    batch_size: int
    from_batch_sizes: tuple[int, ...]
    peak_bytes: int
    predicted_bytes: int

    @property
    def error(self) -> float:
        return abs(self.predicted_bytes / self.peak_bytes - 1)

    @property
    def upward(self) -> bool:
        """Whether both others are smaller, as they are in a search."""
        return max(self.from_batch_sizes) < self.batch_size


def main() -> int:
    """Exit code 1 where the errors are larger than promised, or where there is nothing to predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "h200")
    arguments = parser.parse_args()
    files = arguments.files or files_of_a_gpu()
    classes = recorded_peaks(files)
    backtests = {one: predictions(peaks) for one, peaks in classes.items() if len(peaks) >= FEWEST_SIZES}
    everything = [prediction for made in backtests.values() for prediction in made]
    if not everything:
        print(f"no class of memory has {FEWEST_SIZES} batch sizes in {len(files)} files")
        return 1
    upward = [prediction for prediction in everything if prediction.upward]
    content = {
        "name": "memory_backtest",
        "command": " ".join(["python benchmarks/memory_backtest.py", *(path.name for path in arguments.files)]),
        "recorded": [path.name for path in files],
        "classes": [described(one, made) for one, made in backtests.items()],
        "classes_with_fewer_batch_sizes": len(classes) - len(backtests),
        "all": errors(everything),
        "upward": errors(upward) if upward else None,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "memory_backtest.json").write_text(json.dumps(content, indent=1) + "\n")
    print_table(backtests, len(classes))
    return 0 if as_promised(everything) else 1


# --- what was recorded ------------------------------------------------------------------------------------------------


def files_of_a_gpu() -> list[Path]:
    """All recordings in `tests/data` but the tables of a CPU, where memory is that of a whole process."""
    return sorted([*DATA.glob("**/*.jsonl"), *DATA.glob("**/h200_*.jsonl.gz")])


def recorded_in(path: Path) -> tuple[WorkloadFacts | None, Iterable[RecordedTrial]]:
    """What is known of the program, and its trials."""
    if path.suffix == ".gz":
        table = read_table(path)
        return table.head.workload, table.trials
    trials = read_trials(path)
    return next((trial.answer.facts for trial in trials if trial.answer.facts is not None), None), trials


def recorded_peaks(files: Sequence[Path]) -> dict[MemoryClass, dict[int, Peak]]:
    """For each class of memory the peak of each batch size that ran: the median where it ran more than once."""
    marks: dict[MemoryClass, dict[int, list[MemoryMarks]]] = defaultdict(lambda: defaultdict(list))
    for path in files:
        facts, trials = recorded_in(path)
        for trial in trials:
            seen = seen_memory(trial)
            if seen is not None:
                size = int(trial.config[batch_knob().name])
                marks[memory_class(path, facts, trial, size)][size].append(seen)
    return {
        one: {size: middle(several, graphs=_has_graphs(one)) for size, several in sorted(sizes.items())}
        for one, sizes in marks.items()
    }


def seen_memory(trial: RecordedTrial) -> MemoryMarks | None:
    """Of a trial or a probe of memory that ran."""
    answer = trial.answer
    if answer.measurement is not None:
        return answer.measurement.memory
    return answer.memory.memory if answer.memory is not None else None


def memory_class(path: Path, facts: WorkloadFacts | None, trial: RecordedTrial, size: int) -> MemoryClass:
    """What decides the peak beside the batch: program, knobs, and whether gradients are kept over micro-batches."""
    program = f"{facts.model_class} of {facts.parameter_count:,}" if facts is not None else path.stem
    held = facts.batch_size if facts is not None and facts.batch_held else None
    measured = trial.answer.measurement
    count = measured.micro_batches_per_step if measured is not None else micro_batches_per_step(size, held)
    knobs = {one.name: trial.config.get(one.name, "as_is") for one in KNOBS if one.memory in ("constant", "class")}
    return (("program", program), *knobs.items(), ("accumulates", count > 1))


def _has_graphs(one: MemoryClass) -> bool:
    return any(value in CUDA_GRAPHS for _, value in one)


def middle(several: Sequence[MemoryMarks], *, graphs: bool) -> Peak:
    """The median of what was seen of one size."""
    if graphs:
        return Peak(int(statistics.median(marks.reserved_bytes or 0 for marks in several)), 0)
    rising = [marks.peak_forward_backward_bytes or marks.peak_allocated_bytes for marks in several]
    constant = [marks.peak_optimizer_step_bytes or 0 for marks in several]
    return Peak(int(statistics.median(rising)), int(statistics.median(constant)))


# --- what is predicted ------------------------------------------------------------------------------------------------


def predictions(peaks: Mapping[int, Peak]) -> list[Prediction]:
    """Each size from two others."""
    made = []
    for size, peak in sorted(peaks.items()):
        pair = two_others(size, sorted(peaks))
        slope = bytes_per_sample({other: peaks[other].rising_bytes for other in pair}) or 0
        rising = peaks[pair[1]].rising_bytes + int(slope * (size - pair[1]))
        constant = max(peaks[other].constant_bytes for other in pair)
        made.append(Prediction(size, pair, peak.bytes, max(rising, constant)))
    return made


def two_others(size: int, sizes: Sequence[int]) -> tuple[int, int]:
    """The two that the search would take of those below `size`; where there are not two, the smallest that will do.

    It wants one of them to be at most `APART` of the other: what is close together shows noise for a slope.
    """
    below = [other for other in sizes if other < size]
    if len(below) >= 2:
        top = below[-1]
        return next((other for other in reversed(below) if other <= APART * top), below[-2]), top
    first, *larger = [other for other in sizes if other != size]
    return first, next((other for other in larger if first <= APART * other), larger[-1])


def errors(made: Sequence[Prediction]) -> dict[str, float]:
    """Of the predictions, as shares of what was recorded. The 95th percentile is an error that was made."""
    ordered = sorted(prediction.error for prediction in made)
    return {
        "points": len(ordered),
        "mean": statistics.fmean(ordered),
        "p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
        "largest": ordered[-1],
    }


def as_promised(made: Sequence[Prediction]) -> bool:
    """At most 1 % off in the mean, and 3 % at the 95th percentile."""
    found = errors(made)
    return found["mean"] <= MEAN_PROMISE and found["p95"] <= P95_PROMISE


# --- what is told -----------------------------------------------------------------------------------------------------


def described(one: MemoryClass, made: Sequence[Prediction]) -> dict[str, Any]:
    """A class as it stands in the result file."""
    return {
        "class": dict(one),
        "bytes": "reserved" if _has_graphs(one) else "allocated",
        "predictions": [asdict(prediction) | {"error": prediction.error} for prediction in made],
        **errors(made),
    }


def print_table(backtests: Mapping[MemoryClass, Sequence[Prediction]], classes: int) -> None:
    """A line a class, then all of them."""
    print("points   mean    p95  largest  batch sizes, class")
    for one, made in backtests.items():
        changed = [f"{name}={value}" for name, value in one[1:] if value not in ("as_is", False)]
        sizes = " ".join(str(prediction.batch_size) for prediction in made)
        print(f"{line(made)}  {sizes}, {one[0][1]}, {' '.join(changed) or 'as it is'}")
    everything = [prediction for made in backtests.values() for prediction in made]
    upward = [prediction for prediction in everything if prediction.upward]
    if upward:
        print(f"{line(upward)}  from two smaller ones, as a search predicts")
    verdict = "within" if as_promised(everything) else "OUTSIDE"
    print(f"{line(everything)}  all: {verdict} the promised {MEAN_PROMISE:.0%} and {P95_PROMISE:.0%}")
    print(f"{classes - len(backtests)} further classes have fewer than {FEWEST_SIZES} batch sizes")


def line(made: Sequence[Prediction]) -> str:
    """The errors in columns."""
    found = errors(made)
    return f"{found['points']:6}  {found['mean']:5.2%}  {found['p95']:5.2%}  {found['largest']:7.2%}"


if __name__ == "__main__":
    sys.exit(main())

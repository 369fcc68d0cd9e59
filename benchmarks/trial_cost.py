"""Where a trial's seconds go: from its start until its processes are gone and its memory is back.

    python benchmarks/trial_cost.py TARGET [--repeats N] [--only fork-eager,...] [--out DIR]

Four kinds of trial in turn, on the program's own batch: forked and in a fresh interpreter (`fork`, `fresh`), as the
program stands and with `compile_mode=default` (`eager`, `compiled`). The compiler's cache is kept from trial to trial,
as in a search. Writes `DIR/trial_cost_NAME.json` (NAME from the target's file) after each trial, and prints a table of
medians last. With `examples/gpt2.py` it takes about a minute for each repeat, three for the first.

`beyond` is what a trial costs beside its first step, its warm-up and its measuring, the user's own functions and the
loader's first batch told apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.config import TrainingConfig
from autotune.machine import read_machine_facts
from autotune.nvml import gpu_used_bytes
from autotune.processes.pool import TrialPool
from autotune.processes.watched import WatchedBackend
from autotune.records import Conditions, Phase, TrialAnswer, TrialRequest
from autotune.workload import workload_from_target

KINDS = ("fork-eager", "fork-compiled", "fresh-eager", "fresh-compiled")

YOURS = ("model_fn", "data_fn", "optimizer_fn", "first batch")
MEASURING = ("first step (compile)", "warm-up", "end to end", "resident", "shares")
OURS = ("until it runs", "start", "device (CUDA context)", "rest of the build", "marks", "end", "memory back")


class MemoryWatch:
    """Reads what is in use on the GPU and remembers when it was asked after the trial's end."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def __call__(self) -> int | None:
        used = gpu_used_bytes()
        self.asked.append(time.monotonic())
        return used

    def waited_seconds(self) -> float:
        """From the first look after the trial's end (the one before it comes first of all) to the last."""
        return self.asked[-1] - self.asked[1] if len(self.asked) > 1 else 0.0


def main() -> int:
    """Measures, writes the result file after each trial and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(KINDS), help="of " + ", ".join(KINDS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    kinds = [kind for kind in KINDS if kind in arguments.only.split(",")]
    machine = read_machine_facts()
    content: dict[str, Any] = {
        "name": f"trial_cost_{Path(arguments.target).stem}",
        "command": f"python benchmarks/trial_cost.py {arguments.target} --repeats {arguments.repeats}",
        "machine": machine.model_dump(mode="json", exclude={"identity"}),
        "target": arguments.target,
        "seconds": {kind: [] for kind in kinds},
        "failures": [],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{content['name']}.json"
    device = "cuda" if machine.gpus else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        backends = {method: started(arguments.target, Path(scratch) / method, method) for method in methods(kinds)}
        try:
            for _ in range(arguments.repeats):
                for kind in kinds:
                    one(kind, *backends[kind.partition("-")[0]], device, content)
                    path.write_text(json.dumps(content, indent=1) + "\n")
        finally:
            for backend, _ in backends.values():
                backend.close()
    print(table(content["seconds"]))
    return 0


def methods(kinds: list[str]) -> list[str]:
    """The start methods of these kinds, each once."""
    return list(dict.fromkeys(kind.partition("-")[0] for kind in kinds))


def started(target: str, directory: Path, method: Any) -> tuple[WatchedBackend, MemoryWatch]:
    """What runs trials in a search, and the eye that it has on the GPU's memory."""
    directory.mkdir(parents=True)
    memory = MemoryWatch()
    workload = workload_from_target(target)
    pool = TrialPool(workload, directory, warm_compiler=True, gpu_used_bytes=memory, start_method=method)
    pool.start()
    return WatchedBackend(pool), memory


def one(kind: str, backend: WatchedBackend, memory: MemoryWatch, device: Any, content: dict[str, Any]) -> None:
    """Runs one trial and adds its parts, or its failure, to the content."""
    compiled = {"compile_mode": "default"} if kind.endswith("compiled") else {}
    request = TrialRequest(
        kind="measure",
        config=TrainingConfig(compiled),
        conditions=Conditions(device=device, global_batch_size=None),
    )
    memory.asked.clear()
    begin = time.monotonic()
    phases: dict[Phase, float] = {}
    answer = backend.run(request, lambda phase: phases.setdefault(phase, time.monotonic()) and None)
    total = time.monotonic() - begin
    if answer.measurement is None:
        content["failures"].append({"kind": kind, "failure": str(answer.failure)})
        print(f"{kind}: {answer.failure}", file=sys.stderr)
        return
    found = parts(answer, phases["start"] - begin, memory.waited_seconds(), total)
    content["seconds"][kind].append(found)
    print(f"{kind}: {total:.2f} s, of which {beyond(found):.2f} s beyond", file=sys.stderr)


def parts(answer: TrialAnswer, before: float, memory_back: float, total: float) -> dict[str, float]:
    """The seconds of a trial by the names above; `total` is their sum but for rounding.

    `before` passed until the process reported its first phase: in a fresh interpreter its own imports are in that.
    """
    measurement = answer.measurement
    assert measurement is not None and measurement.spent is not None
    spent = measurement.spent
    user = spent.model_seconds + spent.data_seconds + spent.optimizer_seconds
    inside = {
        "start": spent.start_seconds,
        "device (CUDA context)": spent.device_seconds,
        "model_fn": spent.model_seconds,
        "data_fn": spent.data_seconds,
        "optimizer_fn": spent.optimizer_seconds,
        "rest of the build": measurement.build_seconds - user - spent.device_seconds,
        "first batch": spent.first_batch_seconds,
        "first step (compile)": measurement.first_step_seconds,
        "warm-up": spent.warm_up_seconds,
        "end to end": spent.end_to_end_seconds,
        "resident": spent.resident_seconds,
        "shares": spent.shares_seconds,
    }
    if measurement.start_method == "fresh":
        before = 0.0  # the process is an interpreter that has imported by then: `start` has it
    after = total - before - spent.process_seconds
    return {
        "until it runs": before,
        **inside,
        "marks": spent.process_seconds - sum(inside.values()),
        "end": after - memory_back,
        "memory back": memory_back,
        "total": total,
    }


def beyond(found: dict[str, float]) -> float:
    """What no user's function and no measuring has taken."""
    return sum(found[name] for name in OURS)


def table(seconds: dict[str, list[dict[str, float]]]) -> str:
    """Medians by part, a column for each kind of trial."""
    columns = {kind: trials for kind, trials in seconds.items() if trials}
    lines = [f"{'seconds, median of ' + str(max(map(len, columns.values()), default=0)):32}" + heading(columns)]
    for title, names in (("the user's own", YOURS), ("measuring", MEASURING), ("beyond", OURS)):
        lines.append(row(title, [statistics.median(sum(t[n] for n in names) for t in c) for c in columns.values()]))
        lines += [row("  " + n, [statistics.median(t[n] for t in c) for c in columns.values()]) for n in names]
    lines.append(row("total", [statistics.median(t["total"] for t in c) for c in columns.values()]))
    return "\n".join(lines)


def heading(columns: dict[str, Any]) -> str:
    """The names of the columns."""
    return "".join(f"{kind:>16}" for kind in columns)


def row(name: str, values: list[float]) -> str:
    """One line of the table."""
    return f"{name:32}" + "".join(f"{value:16.3f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())

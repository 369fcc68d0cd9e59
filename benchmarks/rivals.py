"""Holds autotune against other tools: same workloads, same data, one outside clock around what each tool leaves one with.

    python benchmarks/rivals.py [--workload NAME,...] [--only TOOL,...] [--seconds S] [--rounds N] [--budget S]
                                [--limit S] [--tiny] [--out DIR]

Workloads: the three that pytorch-autotune publishes, and GPT-2 124M, all with AdamW. Tools: PyTorch's defaults without and
with TF32, pytorch-autotune 2.0.0, loadtune 0.3.0, Lightning's BatchSizeFinder, accelerate's find_executable_batch_size,
and autotune with the batch held and free. `benchmarks/rival_tools.py` has how each is used and what its user guesses.

A search runs in a process of its own, with a compiler's cache of its own, and is ended after `--limit` seconds. What it
found is kept in `DIR/rivals/`, and not searched again: so the benchmark runs in pieces, such as

    python benchmarks/rivals.py --workload resnet18 --only pytorch-autotune,loadtune --rounds 0    searches only
    python benchmarks/rivals.py --workload resnet18 --only autotune,autotune-free --rounds 0
    python benchmarks/rivals.py --workload resnet18                                                the rest, then rounds

Then every tool's setup is built anew in a fresh process for each round, all in turn, and timed: end to end with the tool's
own loader, and on batches that lie on the device. In its first round its gradients are held against those of the same batch
in fp32, eager, without TF32, and stand beside how far plain bf16 autocast is from them. A tool that fails is a line that
says so; what it printed is in `DIR/rivals/WORKLOAD-TOOL.txt`. Everything is written after each process.

It needs pytorch-autotune, loadtune, lightning and accelerate beside torch. On a machine that has torch, lightning,
accelerate, jinja2, matplotlib, numpy and psutil, two wheels are missing, both `py3-none-any` and without further needs:
pytorch_autotune-2.0.0 and loadtune-0.3.0 (with `--target DIR` and PYTHONPATH=DIR they stay out of the environment).

Seconds on one H200, estimated: searches of one workload 60-360 (pytorch-autotune), 200 (loadtune), 60-300 (lightning,
accelerate), `--budget` and a little (autotune); each round of a tool 15-30.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from autotune.machine import read_machine_facts  # noqa: E402
from autotune.stats import rate  # noqa: E402

WORKLOADS = ("resnet50", "resnet18", "transformer", "gpt2")
TOOLS = (
    "pytorch",
    "pytorch-tf32",
    "pytorch-autotune",
    "loadtune",
    "autotune",
    "lightning",
    "accelerate",
    "autotune-free",
)
HOLD_THE_BATCH = TOOLS[:5]
SHARED_SEARCH = {"autotune-free": "autotune"}
"""Which directory a tool looks into, where that is another's: one search of autotune gives both answers."""
RIGHT_TIMES_BF16 = 2.0
"""Gradients count as right up to so many times the error of plain bf16 autocast, which nobody calls wrong."""
GIB = 2**30


def main() -> int:
    """Searches, times, writes a result file for each workload and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--only", default=",".join(TOOLS))
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="that a round times end to end; half as many resident"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for a search of autotune")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which a search is ended")
    parser.add_argument("--tiny", action="store_true", help="sizes for trying the benchmark out without a GPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    # A benchmark that is cut off leaves nothing running.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    for name in chosen(arguments.workload, WORKLOADS):
        comparison = Comparison(name, arguments)
        tools = chosen(arguments.only, TOOLS)
        for tool in tools:
            comparison.search(tool)
        for _ in range(arguments.rounds):
            for tool in tools:
                comparison.time(tool)
        print(table(comparison.content), flush=True)
    return 0


def chosen(text: str, known: tuple[str, ...]) -> list[str]:
    """The names in a list, in our order. Raises ValueError for one that is not known."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"there is no {name!r}; choose of {', '.join(known)}")
    return [name for name in known if name in names]


class Comparison:
    """All tools on one workload; goes on from the file that an earlier call has left."""

    def __init__(self, workload: str, arguments: argparse.Namespace) -> None:
        self.workload = workload
        self.arguments = arguments
        self.directory = (arguments.out / "rivals").resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.caches = Path(tempfile.gettempdir()) / f"autotune-rivals-{os.getuid()}"
        self.caches.mkdir(exist_ok=True)
        self.path = self.directory / f"{workload}.json"
        machine = read_machine_facts().model_dump(mode="json", exclude={"identity"})
        self.content: dict[str, Any] = {
            "name": f"rivals_{workload}",
            "command": "python benchmarks/rivals.py",
            "tiny": arguments.tiny,
            "machine": machine,
            "tools": {},
        }
        if self.path.exists():
            earlier = json.loads(self.path.read_text())
            if earlier["tiny"] == arguments.tiny and cards(earlier["machine"]) == cards(machine):
                self.content["tools"] = earlier["tools"]
            else:
                print(f"{self.path} is of other GPUs or sizes, and begun anew", file=sys.stderr)

    def search(self, tool: str) -> None:
        """What the tool finds, unless it is known; a failure is tried again."""
        line = self.content["tools"].setdefault(tool, {})
        if "finding" in line:
            return
        line.clear()
        print(f"{self.workload}: {tool} searches", file=sys.stderr, flush=True)
        kept = self.own_directory(tool)
        began = time.monotonic()
        answer = self.run(tool, ["search", tool, self.workload, str(kept), str(self.arguments.budget)])
        if isinstance(answer, str):
            line |= {"failure": answer, "failed_after_seconds": time.monotonic() - began}
        else:
            line |= {"finding": answer, "rounds": []}
            first = self.content["tools"].get(SHARED_SEARCH.get(tool, ""), {})
            if "finding" in first:
                answer["search_seconds"] = first["finding"]["search_seconds"]
        self.write()

    def time(self, tool: str) -> None:
        """One round of one tool; a failure in it takes the tool out of further rounds."""
        line = self.content["tools"][tool]
        if "finding" not in line or "failure" in line:
            return
        print(f"{self.workload}: {tool} is timed", file=sys.stderr, flush=True)
        finding = self.caches / "finding.json"
        finding.write_text(json.dumps(line["finding"]))
        command = [
            "time",
            tool,
            self.workload,
            str(self.own_directory(tool)),
            str(self.arguments.seconds),
            str(finding),
        ]
        if not line["rounds"] and (reference := self.reference(line)) is not None:
            command.append(str(reference))
        answer = self.run(tool, command)
        if isinstance(answer, str):
            line["failure"] = answer
        else:
            line["rounds"].append(answer)
        self.write()

    def reference(self, line: dict[str, Any]) -> Path | None:
        """The gradients to compare with; None where fp32 does not fit at that batch, which the line then says."""
        sizes = [str(line["finding"][name]) for name in ("batch_size", "micro_batch_size")]
        path = self.caches / f"reference-{self.workload}-{'-'.join(sizes)}-{self.arguments.tiny}.pt"
        if not path.exists():
            answer = self.run("reference", ["reference", *sizes, self.workload, str(path)])
            if isinstance(answer, str):
                line["no_reference"] = answer
                return None
        return path

    def own_directory(self, tool: str) -> Path:
        """Where a tool keeps what it has found."""
        path = self.directory / f"{self.workload}-{SHARED_SEARCH.get(tool, tool)}"
        path.mkdir(exist_ok=True)
        return path

    def run(self, tool: str, arguments: list[str]) -> dict[str, Any] | str:
        """The answer of a fresh process, or in words how it failed. What it prints is added to the tool's text."""
        cache = self.caches / f"{self.workload}-{SHARED_SEARCH.get(tool, tool)}"
        cache.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "PYTHONUNBUFFERED": "1",  # what a process printed before it was ended is worth reading
            "RIVALS_TINY": "1" if self.arguments.tiny else "0",
        }
        if self.arguments.tiny:
            environment["OMP_NUM_THREADS"] = "1"
        log = self.directory / f"{self.workload}-{tool}.txt"
        with log.open("a") as stream:
            stream.write(f"--- {' '.join(arguments[:3])}\n")
            stream.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.rival_clock", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stream,
                cwd=cache,
                start_new_session=True,
                text=True,
            )
            try:
                printed, _ = process.communicate(timeout=self.arguments.limit)
            except subprocess.TimeoutExpired:
                end_group(process)
                stream.write(process.communicate()[0])
                return f"did not end within {self.arguments.limit:.0f} s"
            except BaseException:
                end_group(process)
                raise
            stream.write(printed)
        if process.returncode == 0:
            answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
            return answer
        return f"ended with status {process.returncode}: {last_line(log)}"

    def write(self) -> None:
        """What is known so far, under a temporary name that is then renamed."""
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.content, indent=1) + "\n")
        unfinished.rename(self.path)


def cards(machine: dict[str, Any]) -> list[tuple[str, int]]:
    """What a machine's GPUs have to share with another's for results of both to stand in one file: not what is in use."""
    return [(gpu["name"], gpu["total_bytes"]) for gpu in machine["gpus"]]


def end_group(process: subprocess.Popen[str]) -> None:
    """Kills a process with all that it has started in its session."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    """The last line of a text that says anything: of a traceback the error."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if not line.startswith((" ", "---"))]
    return (errors or lines or [""])[-1][:300]


# --- the table --------------------------------------------------------------------------------------------------------


def table(content: dict[str, Any]) -> str:
    """One line for each tool; rates are of all rounds together, with their 95 % interval."""
    title = f"{content['name']}{' (tiny: says nothing of speed)' if content['tiny'] else ''}"
    rates = f"{'samples/s (95 %)':>32} {'resident/s':>11}"
    heading = f"{'tool':17}{'batch':>6} {rates} {'search':>8} {'GiB':>6}  gradients; chose"
    lines = [row(tool, content["tools"][tool]) for tool in TOOLS if tool in content["tools"]]
    return "\n".join([title, heading, *lines, *ahead(content["tools"])])


def row(tool: str, line: dict[str, Any]) -> str:
    """One tool's line."""
    if "finding" not in line:
        return f"{tool:17} FAILED after {line['failed_after_seconds']:.0f} s: {line['failure']}"
    finding, rounds = line["finding"], line["rounds"]
    begin = f"{tool:17}{finding['batch_size']:6} "
    search = f"{finding['search_seconds']:7.0f}s"
    if not rounds:
        return f"{begin}{'':32} {'':11} {search} {'':6}  {line.get('failure', 'not timed')}; {finding['chose']}"
    value, (low, high) = rate_of(rounds)
    resident = sum(r["resident_samples"] for r in rounds) / sum(r["resident_seconds"] for r in rounds)
    peak = max((r["peak_bytes"] or 0) for r in rounds) / GIB
    interval = f"{value:,.0f} ({low:,.0f} to {high:,.0f})" if len(rounds) > 1 else f"{value:,.0f}"
    failed = f"; FAILED in a later round: {line['failure']}" if "failure" in line else ""
    return (
        f"{begin}{interval:>32} {resident:11,.0f} {search} {peak:6.1f}  {gradients(line)}; {finding['chose']}{failed}"
    )


def rate_of(rounds: list[dict[str, Any]]) -> tuple[float, tuple[float, float]]:
    """Samples per second, end to end."""
    return rate([one["samples"] for one in rounds], [one["seconds"] for one in rounds])


def gradients(line: dict[str, Any]) -> str:
    """Whether they are right, with the error that they have and the one that plain bf16 has."""
    if "no_reference" in line:
        return f"not compared ({line['no_reference'][:60]})"
    found = next((one["gradients"] for one in line["rounds"] if "gradients" in one), None)
    if found is None:
        return "not compared"
    if found["missing"]:
        what = found["missing"][0] if found["skipped_steps"] == 0 else f"{found['skipped_steps']} steps skipped"
        return f"WRONG: {len(found['missing'])} missing ({what})"
    worst = max(found["errors"])
    right = worst <= RIGHT_TIMES_BF16 * found["bf16_error"]
    return f"{'right' if right else 'WRONG'} {worst:.1e} (bf16 {found['bf16_error']:.1e})"


def ahead(tools: dict[str, Any]) -> list[str]:
    """Whether autotune is ahead of each other tool: at the held batch of those that hold it, of the others with it free."""
    lines = []
    for own, others in (("autotune", HOLD_THE_BATCH[:-1]), ("autotune-free", TOOLS[len(HOLD_THE_BATCH) : -1])):
        if not tools.get(own, {}).get("rounds"):
            continue
        mine, _ = rate_of(tools[own]["rounds"])
        for other in others:
            if tools.get(other, {}).get("rounds"):
                theirs, _ = rate_of(tools[other]["rounds"])
                lines.append(f"{own} over {other}: {mine / theirs:.3f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())

"""Measures what the README quotes anew, on a machine with a GPU: its tests and every benchmark, one after the other.

    python benchmarks/everything.py [--only NAME,...] [--out DIR] [--wait S] [--list]

Each part is a command of its own (`--list` prints them): `tests`; `search-EXAMPLE`, a whole search; `outsider-EXAMPLE`,
which needs that search; `table-EXAMPLE`; `finders` and `rivals`, which need what their scripts say. `--only` names some, in
the order in which they are to run. A part that failed ends nothing but itself; one that ended well is not run again. DIR
(`benchmarks/results`) gets the result files; `DIR/everything/` each part's output, its seconds and the studies. Without that
directory all begins anew.

With `--wait`, for machines that end a command after a while, the parts run in the background: the call returns after S
seconds at the latest, and the same call waits for them further, or runs again what failed where none runs any more. All of
it takes hours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil

HERE = Path(__file__).parent
SEARCHES = {
    "resnet50": "--budget 285s",
    "gpt2": "--budget 3m --train-samples 1000000",
    "small": "--budget 117s",
    "slow_loader": "--space loader --budget 75s",
    "quickstart": "--budget 75s",
}
TABLE_SECONDS = {"resnet50": 1100, "slow_loader": 900, "small": 600, "gpt2": 1100}
POLL_SECONDS = 0.5


def parts_of(out: Path, kept: Path) -> dict[str, list[str]]:
    """Every part's command, in the order that they run in. Studies stay in `kept`, for what needs them."""
    commands = {"tests": "-m pytest -q -m gpu tests/gpu"}
    for name, options in SEARCHES.items():
        commands[f"search-{name}"] = (
            f"benchmarks/whole_search.py {name} examples/{name}.py --out {out} --study {kept}/{name} -- {options}"
        )
    for name in SEARCHES:
        commands[f"outsider-{name}"] = f"benchmarks/outsider.py {kept}/{name}/best.json --out {out}"
    for name, seconds in TABLE_SECONDS.items():
        commands[f"table-{name}"] = (
            f"benchmarks/record_table.py examples/{name}.py --name h200_{name} --seconds {seconds} "
            f"--study {kept}/table-{name}"
        )
    commands["finders"] = f"benchmarks/batch_finders.py examples/gpt2.py --memory-limit 24GiB --out {out}"
    commands["rivals"] = f"benchmarks/rivals.py --out {out}"
    return {name: [sys.executable, *command.split()] for name, command in commands.items()}


def main() -> int:
    """1 where a part failed; 0 also where parts still run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--out", type=lambda text: Path(text).resolve(), default=HERE / "results")
    parser.add_argument("--wait", type=float, metavar="S")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    kept = arguments.out / "everything"
    parts = parts_of(arguments.out, kept)
    names = arguments.only or list(parts)
    if unknown := set(names) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    if arguments.list:
        print("\n".join(f"{name:22} {' '.join(['python', *parts[name][1:]])}" for name in names))
        return 0
    kept.mkdir(parents=True, exist_ok=True)
    if arguments.wait is None:
        run(kept, {name: parts[name] for name in names})
    else:
        if not is_running(kept):
            forget_failures(kept, names)
            begin_in_background(kept, ["--only", ",".join(names), "--out", str(arguments.out)])
        wait(kept, arguments.wait)
    done = ended(kept)
    print("\n".join(line(name, done.get(name)) for name in names))
    return int(any(done.get(name, {}).get("exit_code") for name in names))


def run(kept: Path, parts: dict[str, list[str]]) -> None:
    """Runs the parts that have not ended well, and notes after each what came of it."""
    for name, command in parts.items():
        if ended(kept).get(name, {}).get("exit_code") == 0:
            continue
        began = time.monotonic()
        with (kept / f"{name}.txt").open("w") as output:
            finished = subprocess.run(command, cwd=HERE.parent, stdout=output, stderr=output, check=False)
        came = {"exit_code": finished.returncode, "seconds": round(time.monotonic() - began, 1)}
        _note(kept, {**ended(kept), name: came})


def ended(kept: Path) -> dict[str, dict[str, float]]:
    """Exit code and seconds of each part that has run."""
    path = kept / "ended.json"
    found: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def forget_failures(kept: Path, names: Collection[str]) -> None:
    """Of parts that are about to run again: whoever looks meanwhile would take an earlier failure for theirs."""
    _note(kept, {name: came for name, came in ended(kept).items() if name not in names or came["exit_code"] == 0})


def _note(kept: Path, came: dict[str, dict[str, float]]) -> None:
    written = kept / "ended.json.new"
    written.write_text(json.dumps(came, indent=1) + "\n")
    written.replace(kept / "ended.json")


def begin_in_background(kept: Path, arguments: list[str]) -> None:
    """This script without `--wait`, in a session of its own."""
    with (kept / "everything.txt").open("w") as output:
        started = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    (kept / "running.pid").write_text(str(started.pid))


def is_running(kept: Path) -> bool:
    """Whether the parts run in the background."""
    path = kept / "running.pid"
    try:
        process = psutil.Process(int(path.read_text()))
        return process.status() != psutil.STATUS_ZOMBIE and Path(__file__).name in " ".join(process.cmdline())
    except (OSError, ValueError, psutil.Error):
        return False


def wait(kept: Path, seconds: float) -> None:
    """Until all parts have ended, or so long."""
    until = time.monotonic() + seconds
    while is_running(kept) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)


def line(name: str, came: dict[str, float] | None) -> str:
    """What came of a part."""
    if came is None:
        return f"{name:22} not yet"
    return f"{name:22} {'well' if came['exit_code'] == 0 else 'failed':6} {came['seconds']:7.1f} s"


if __name__ == "__main__":
    sys.exit(main())

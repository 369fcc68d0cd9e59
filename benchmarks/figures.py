"""Recomputes every figure of the README from the files in `benchmarks/results/`.

    python benchmarks/figures.py                    prints the two blocks
    python benchmarks/figures.py --write README.md  puts them between the README's markers
    python benchmarks/figures.py --check README.md  exit code 1 where the README says something else

Rates and ratios of the H200 are computed anew from the raw blocks of the confirmation, not copied. What the demo shows is
the report of the `best.json` that `make demo` left on a machine of two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from autotune.result import load as load_result
from autotune.stats import rate, ratio

RESULTS = Path(__file__).parent / "results" / "h200"
DEMO = Path(__file__).parent / "results" / "cpu" / "quickstart.best.json"
FIGURES_MARKERS = ("<!-- figures: begin (benchmarks/figures.py) -->", "<!-- figures: end -->")
DEMO_MARKERS = ("<!-- demo: begin (benchmarks/figures.py) -->", "<!-- demo: end -->")
TOKENS_PER_SAMPLE = 1024
"""Of examples/gpt2.py."""
GIB = 2**30


def main() -> int:
    """Prints, writes or checks the block."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path)
    arguments = parser.parse_args()
    if arguments.write:
        arguments.write.write_text(renewed(arguments.write.read_text()))
    elif arguments.check:
        return int(renewed(arguments.check.read_text()) != arguments.check.read_text())
    else:
        print(demo(), figures(), sep="\n\n")
    return 0


def renewed(text: str) -> str:
    """The text with both blocks between their markers."""
    for (begin, end), block in ((DEMO_MARKERS, demo()), (FIGURES_MARKERS, figures())):
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{block}\n{end}{after}"
    return text


def demo() -> str:
    """What a search ends with, up to the memory ceilings."""
    report = str(load_result(DEMO)).split("\n\nMemory ceilings")[0]
    shown = (
        "What one sees in the end (two cores of an AMD EPYC; progress comes before it, ceilings and files after it):"
    )
    return f"{shown}\n\n```\n{report}\n```"


def figures() -> str:
    """Everything that the README says of the H200, as Markdown."""
    repeated = [load(f"gpt2_{number}") for number in range(1, 4)]
    searches = [*repeated, load("gpt2_16gib")]
    small = [load(f"small_{number}") for number in range(1, 4)]
    starts = load("trial_start")["seconds_to_first_step"]
    fork, fresh = statistics.median(starts["fork"]), statistics.median(starts["fresh"])
    machine = searches[0]["machine"]
    lines = [
        f"On one {machine['gpus'][0]['name']}, torch {machine['torch_version'].split('+')[0]}, GPT-2 124M "
        "(`examples/gpt2.py`, 1,024 tokens a sample):",
        "",
        "| search | yours, tokens/s | recommended, tokens/s | times the speed (95 %) | peak memory, GiB | search took |",
        "|---|---|---|---|---|---|",
        *(row(search) for search in searches),
        "",
        *(f"- `{command}` recommends {found}" for command, found in recommended(searches).items()),
        f"- {again(small)}",
        f"- From the start of a trial's process to the end of its first step: {fork:.1f} s forked, {fresh:.1f} s in a "
        f"fresh interpreter (median of {len(starts['fork'])}).",
    ]
    return "\n".join(lines)


def load(name: str) -> dict[str, Any]:
    """One result file."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def row(search: dict[str, Any]) -> str:
    """One search as a line of the table."""
    yours, recommended = search["baseline"], search["recommended"]
    value, (low, high) = ratio(round_rates(recommended), round_rates(yours))
    return (
        f"| `{search['name']}` | {tokens(yours):,.0f} | {tokens(recommended):,.0f} | {value:.2f} ({low:.2f} to {high:.2f}) "
        f"| {yours['peak_allocated_bytes'] / GIB:.1f} → {recommended['peak_allocated_bytes'] / GIB:.1f} "
        f"| {search['search_seconds']:.0f} s |"
    )


def round_rates(answer: dict[str, Any]) -> list[float]:
    """Samples per second of each confirmation round."""
    rounds = zip(answer["block_samples"], answer["block_seconds"], strict=True)
    return [sum(samples) / sum(seconds) for samples, seconds in rounds]


def tokens(answer: dict[str, Any]) -> float:
    """Tokens per second over all confirmation rounds."""
    samples = [sum(one) for one in answer["block_samples"]]
    seconds = [sum(one) for one in answer["block_seconds"]]
    return TOKENS_PER_SAMPLE * rate(samples, seconds)[0]


def recommended(searches: list[dict[str, Any]]) -> dict[str, str]:
    """What each command recommends, and how often, where it was given several times."""
    found: dict[str, list[str]] = {}
    for search in searches:
        found.setdefault(search["command"], []).append(changes(search))
    return {command: each_time(every) for command, every in found.items()}


def each_time(found: list[str]) -> str:
    """The same said once, or what differs."""
    if len(found) == 1:
        return found[0]
    return f"{found[0]}, each of {len(found)} times" if len(set(found)) == 1 else "; ".join(found)


def again(searches: list[dict[str, Any]]) -> str:
    """Several searches with one command, which gave the gains of a batch that is held."""
    ((command, found),) = recommended(searches).items()
    gains = ", ".join(f"{search['recommended']['speedup']['value']:.2f}" for search in searches)
    seconds = [search["search_seconds"] for search in searches]
    return (
        f"`{command}` (24 narrow layers) recommends {found}, {gains} times the speed, within {min(seconds):.0f} to "
        f"{max(seconds):.0f} s"
    )


def changes(search: dict[str, Any]) -> str:
    """The knobs in which the recommendation differs from the baseline."""
    before, after = search["baseline"]["config"], search["recommended"]["config"]
    differing = [f"{name}={value}" for name, value in after.items() if before[name] != value]
    return ", ".join(f"`{text}`" for text in differing) or "to keep everything"


if __name__ == "__main__":
    sys.exit(main())

"""Recomputes every figure of the README from the files in `benchmarks/results/`.

    python benchmarks/figures.py                    prints the blocks
    python benchmarks/figures.py --write README.md  puts them between the README's markers
    python benchmarks/figures.py --check README.md  exit code 1 where the README says something else

Rates of the H200 are computed anew from the raw blocks of the confirmation, not copied. What the demo shows is the report of
the `best.json` that `make demo` left on a machine of two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from autotune.quantities import format_bytes
from autotune.result import load as load_result

RESULTS = Path(__file__).parent / "results" / "h200"
QUALITY = Path(__file__).parent / "results" / "search_quality.json"
DEMO = Path(__file__).parent / "results" / "cpu" / "quickstart.best.json"
FIGURES_MARKERS = ("<!-- figures: begin (benchmarks/figures.py) -->", "<!-- figures: end -->")
DEMO_MARKERS = ("<!-- demo: begin (benchmarks/figures.py) -->", "<!-- demo: end -->")
QUALITY_MARKERS = ("<!-- quality: begin (benchmarks/figures.py) -->", "<!-- quality: end -->")
GOOD = 0.95
TOKENS_PER_SAMPLE = 1024
"""Of examples/gpt2.py."""


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
        print(demo(), figures(), quality(), sep="\n\n")
    return 0


def renewed(text: str) -> str:
    """The text with every block between its markers."""
    blocks = ((DEMO_MARKERS, demo()), (FIGURES_MARKERS, figures()), (QUALITY_MARKERS, quality()))
    for (begin, end), block in blocks:
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
    gpt2 = [load(f"gpt2_{number}") for number in range(1, 4)]
    small = [load(f"small_{number}") for number in range(1, 4)]
    smaller_card = [load("gpt2_16gib")]
    resnet50 = [load("resnet50")]
    machine = gpt2[0]["machine"]
    lines = [
        f"On one {machine['gpus'][0]['name']}, torch {machine['torch_version'].split('+')[0]}, from the command to the "
        "answer, confirmation, parity and soak included; where a command was given several times, a figure for each. A "
        "sample of GPT-2 124M is 1,024 tokens.",
        "",
        "| command | yours | recommended | times the speed (95 %) | peak memory | took, s |",
        "|---|---|---|---|---|---|",
        row(gpt2, "tokens/s", TOKENS_PER_SAMPLE),
        row(smaller_card, "tokens/s", TOKENS_PER_SAMPLE),
        row(resnet50, "samples/s", 1),
        row(small, "samples/s", 1),
        "",
        *(
            f"- `{repeated[0]['command']}` recommends {recommended(repeated)}."
            for repeated in (gpt2, smaller_card, resnet50, small)
        ),
    ]
    return "\n".join(lines)


def quality() -> str:
    """How near searches come to the best point of a table."""
    runs: list[dict[str, Any]] = json.loads(QUALITY.read_text())["runs"]
    limits = list(dict.fromkeys(run["limit"] for run in runs))
    lines = [
        f"| table | strategy | {' | '.join(limit if limit.endswith('s') else f'{limit} trials' for limit in limits)} |",
        f"|---|---|{'---|' * len(limits)}",
    ]
    for table, strategy in dict.fromkeys((run["table"], run["strategy"]) for run in runs):
        of_both = [run for run in runs if (run["table"], run["strategy"]) == (table, strategy)]
        shares = {limit: [run["share"] for run in of_both if run["limit"] == limit] for limit in limits}
        cells = [f"{sum(share >= GOOD for share in one) / len(one):.0%}, {min(one):.0%}" for one in shares.values()]
        lines.append(f"| {table} | {strategy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def load(name: str) -> dict[str, Any]:
    """One result file."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def row(searches: list[dict[str, Any]], unit: str, units_per_sample: int) -> str:
    """Several searches with one command as a line of the table."""
    assert len({search["command"] for search in searches}) == 1
    yours, recommended = ([search[which] for search in searches] for which in ("baseline", "recommended"))
    rates = [f"{units_per_sample * rate_of(one):,.0f}" for one in recommended]
    batches = {f"{one['config']['batch_size']}" for one in yours}
    own = units_per_sample * statistics.median(map(rate_of, yours))
    peaks = {
        f"{format_bytes(mine['peak_allocated_bytes'])} → {format_bytes(other['peak_allocated_bytes'])}"
        for mine, other in zip(yours, recommended, strict=True)
    }
    cells = [
        f"`{searches[0]['command']}`",
        f"{own:,.0f} {unit}, micro-batch {' or '.join(batches)}",
        f"{', '.join(rates)} {unit}".replace(", ", "; "),
        "; ".join(map(gain, searches)),
        "; ".join(sorted(peaks)),
        "; ".join(f"{search['search_seconds']:.0f}" for search in searches),
    ]
    return f"| {' | '.join(cells)} |"


def gain(search: dict[str, Any]) -> str:
    """As the search told it: from its rounds, and from how far processes are expected to differ where it had few."""
    speedup = search["recommended"]["speedup"]
    low, high = speedup["interval"]
    return f"{speedup['value']:.2f} ({low:.2f} to {high:.2f})"


def rate_of(answer: dict[str, Any]) -> float:
    """Samples per second over all confirmation rounds."""
    samples = [sum(one) for one in answer["block_samples"]]
    seconds = [sum(one) for one in answer["block_seconds"]]
    return sum(samples) / sum(seconds)


def recommended(searches: list[dict[str, Any]]) -> str:
    """The same said once, or what differs."""
    found = list(map(changes, searches))
    if len(found) == 1:
        return found[0]
    return f"{found[0]}, each of {len(found)} times" if len(set(found)) == 1 else "; ".join(found)


def changes(search: dict[str, Any]) -> str:
    """The knobs in which the recommendation differs from the baseline."""
    before, after = search["baseline"]["config"], search["recommended"]["config"]
    differing = [f"{name}={value}" for name, value in after.items() if before[name] != value]
    return ", ".join(f"`{text}`" for text in differing) or "to keep everything"


if __name__ == "__main__":
    sys.exit(main())

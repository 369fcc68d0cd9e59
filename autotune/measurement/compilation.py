"""What torch's compiler has done so far in this process."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class CompileCounts:
    """Counters since the process started."""

    graphs: int = 0
    breaks: int = 0
    cache_hits: int = 0


def compile_counts() -> CompileCounts:
    """The counters now; zeros where the compiler was never imported."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return CompileCounts()
    counters = dynamo.counters
    hits = counters["inductor"].get("fxgraph_cache_hit", 0) + counters["aot_autograd"].get("autograd_cache_hit", 0)
    return CompileCounts(
        graphs=int(counters["stats"].get("unique_graphs", 0)),
        breaks=int(sum(counters["graph_break"].values())),
        cache_hits=int(hits),
    )


def break_reason() -> str:
    """Why the compiler first gave up on a piece of the step, in its own words and in brackets; empty where it did not."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return ""
    reasons = [*dynamo.counters["graph_break"], *dynamo.counters["unimplemented"]]
    return f" ({str(reasons[0]).splitlines()[0]})" if reasons else ""

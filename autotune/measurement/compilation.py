"""What torch's compiler has done so far in this process."""

from __future__ import annotations

import sys
from dataclasses import dataclass

MOST_BEGUN_ANEW = 2
"""So often blocks in which something was compiled are dropped: for the shorter last batch of a pass, and once for shapes
that vary. What is compiled again and again is a part of every step."""


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


class Compilations:
    """Tells blocks in which something was compiled, which are no part of a rate."""

    def __init__(self) -> None:
        self._graphs = compile_counts().graphs
        self._begun_anew = 0

    def are_new(self) -> bool:
        """Whether something was compiled since this was last true; `MOST_BEGUN_ANEW` times at most."""
        graphs = compile_counts().graphs
        if graphs <= self._graphs or self._begun_anew == MOST_BEGUN_ANEW:
            return False
        self._graphs, self._begun_anew = graphs, self._begun_anew + 1
        return True


def break_reason() -> str:
    """Why the compiler first gave up on a piece of the step, in its own words and in brackets; empty where it did not."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return ""
    reasons = [*dynamo.counters["graph_break"], *dynamo.counters["unimplemented"]]
    return f" ({str(reasons[0]).splitlines()[0]})" if reasons else ""

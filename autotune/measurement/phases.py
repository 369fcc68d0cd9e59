"""What a trial process does with a request: one entry for every kind of trial."""

from __future__ import annotations

from collections.abc import Callable

from autotune.measurement.facts import read_facts
from autotune.measurement.measure import measure
from autotune.measurement.parity import check_parity
from autotune.measurement.probes import probe_loader, probe_memory
from autotune.measurement.soak import soak
from autotune.records import Phase, TrialAnswer, TrialRequest
from autotune.workload import UserFunctions


def answer(request: TrialRequest, functions: UserFunctions, phase: Callable[[Phase], None]) -> TrialAnswer:
    """Runs the request in this process. Whatever goes wrong is raised; the caller makes a `Failure` of it."""
    if request.kind == "facts":
        return TrialAnswer(facts=read_facts(functions, request, phase))
    if request.kind == "measure":
        return TrialAnswer(measurement=measure(functions, request, phase))
    if request.kind == "memory":
        return TrialAnswer(memory=probe_memory(functions, request, phase))
    if request.kind == "loader":
        return TrialAnswer(loader=probe_loader(functions, request, phase))
    if request.kind == "parity":
        return TrialAnswer(parity=check_parity(functions, request, phase))
    return TrialAnswer(soak=soak(functions, request, phase))

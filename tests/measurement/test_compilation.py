from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from autotune.measurement.compilation import Compilations, CompileCounts, compile_counts

X = torch.ones(3)


def fresh_counts() -> CompileCounts:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return compile_counts()


def test_graphs_and_recompiles_are_counted() -> None:
    assert fresh_counts() == CompileCounts()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(X)
    assert compile_counts().graphs == 1
    compiled(X)
    assert compile_counts().graphs == 1
    compiled(X.double())
    assert compile_counts().graphs == 2


def test_breaks_are_counted() -> None:
    fresh_counts()

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch.compile(broken, backend="eager")(X)
    counts = compile_counts()
    assert counts.breaks == 1
    assert counts.graphs == 2


def test_without_a_compiler_there_are_zeros_and_none_is_imported() -> None:
    code = (
        "import sys, torch\n"
        "from autotune.measurement.compilation import Compilations, CompileCounts, compile_counts\n"
        "loaded = 'torch._dynamo.utils' in sys.modules\n"
        "assert compile_counts() == CompileCounts(0, 0, 0)\n"
        "assert ('torch._dynamo.utils' in sys.modules) == loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


def test_what_is_compiled_anew_is_told_once_each_and_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [3]
    monkeypatch.setattr("autotune.measurement.compilation.compile_counts", lambda: CompileCounts(graphs=seen[-1]))
    compilations = Compilations()
    told = []
    for graphs in (3, 4, 4, 6, 7):
        seen.append(graphs)
        told.append(compilations.are_new())
    assert told == [False, True, False, True, False]

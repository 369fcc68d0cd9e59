"""The worked example of CONTRIBUTING.md is a knob that works, and its test passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.config import TrainingConfig
from autotune.knobs.base import CodeLines, Knob
from tests.knobs.search_facts import cpu_facts, cuda_facts

TEXT = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text()


def code_after(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def names() -> dict[str, Any]:
    """What the example's module defines."""
    defined: dict[str, Any] = {"__name__": "autotune.knobs.cudnn_benchmark"}
    exec(code_after("the knob"), defined)
    return defined


def test_the_knob_keeps_the_contract(names: dict[str, Any]) -> None:
    knob: Knob = names["CudnnBenchmark"]()
    assert knob.choices(cuda_facts()) == ("as_is", "on")
    assert knob.choices(cpu_facts()) == ("as_is",)
    assert knob.refused(cpu_facts()) == {None: "cuDNN needs a GPU"}
    assert knob.rank(knob.baseline(cuda_facts()), cuda_facts()) == 0
    assert knob.conflict("on", {}, cuda_facts()) is None
    assert knob.conflict("on", {}, cpu_facts()) == "cuDNN needs a GPU"
    config = TrainingConfig({"cudnn_benchmark": "on"})
    assert knob.export("as_is", config, cuda_facts()) == CodeLines()
    with pytest.raises(ValueError, match="cudnn_benchmark has no value 'fast'; known are as_is, on"):
        knob.parse("fast")


def test_the_example_of_a_test_passes_and_can_fail(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scope = {**names, "torch": torch}
    exec(code_after("its test"), scope)
    scope["test_applied_cudnn_may_try_its_algorithms"](monkeypatch)
    monkeypatch.setattr(names["CudnnBenchmark"], "configure_process", Knob.configure_process)
    with pytest.raises(AssertionError):
        scope["test_applied_cudnn_may_try_its_algorithms"](monkeypatch)

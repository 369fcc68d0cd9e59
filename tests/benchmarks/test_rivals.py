"""The comparison with other tools: wrong gradients are seen as wrong, honest ones as right, and failures are lines."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.rival_clock import compared, save_reference
from benchmarks.rival_tools import TOOLS as TOOL_SETUPS
from benchmarks.rival_tools import Setup
from benchmarks.rivals import RIGHT_TIMES_BF16, TOOLS, Comparison, cards, table

BATCH = 8


def workload() -> Any:
    x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1))
    return SimpleNamespace(
        BATCH_SIZE=BATCH // 2,
        dataset=lambda: torch.utils.data.TensorDataset(x, x.sum(1) ** 2),
        model_fn=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)),
        criterion=lambda scores, targets: nn.functional.mse_loss(scores.float()[:, 0], targets),
    )


def stepping(which: str) -> Setup:
    """A setup that trains rightly, in one of several ways, or wrongly in another."""
    model = workload().model_fn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = workload().criterion
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=which == "scaled")
    overflows = iter([True, True, False, False, False])

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        if which == "halves":
            losses = [
                criterion(model(x), y) / 2 for x, y in zip(*(part.split(BATCH // 2) for part in batch), strict=True)
            ]
        elif which == "forgets":
            losses = [criterion(model(batch[0][: BATCH // 2]), batch[1][: BATCH // 2])]
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=which == "bf16"):
                losses = [criterion(model(batch[0]), batch[1])]
        for loss in losses:
            scaler.scale(loss).backward()
        if which == "detaches":
            model[0].weight.grad = None
        if which == "scaled" and next(overflows):
            model[0].weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()

    return Setup(model, optimizer, iter(()), step)


@pytest.mark.parametrize("which", ["plain", "halves", "bf16", "scaled"])
def test_honest_gradients_are_right(which: str, tmp_path: Path) -> None:
    save_reference(workload(), BATCH, BATCH, tmp_path / "reference.pt")
    found = compared(stepping(which), workload(), BATCH, tmp_path / "reference.pt")
    assert not found["missing"]
    assert max(found["errors"]) <= (RIGHT_TIMES_BF16 * found["bf16_error"] if which == "bf16" else 1e-5)
    assert found["skipped_steps"] == (2 if which == "scaled" else 0)


def test_half_a_batch_is_told_from_a_whole_one(tmp_path: Path) -> None:
    save_reference(workload(), BATCH, BATCH, tmp_path / "reference.pt")
    found = compared(stepping("forgets"), workload(), BATCH, tmp_path / "reference.pt")
    assert max(found["errors"]) > RIGHT_TIMES_BF16 * found["bf16_error"]


def test_a_gradient_that_is_missing_is_named(tmp_path: Path) -> None:
    save_reference(workload(), BATCH, BATCH, tmp_path / "reference.pt")
    assert compared(stepping("detaches"), workload(), BATCH, tmp_path / "reference.pt")["missing"] == ["0.weight"]


def test_the_table_tells_failures_and_who_is_ahead() -> None:
    def timed(samples: int, **more: Any) -> dict[str, Any]:
        one = {
            "samples": samples,
            "seconds": 1.0,
            "resident_samples": samples,
            "resident_seconds": 1.0,
            "peak_bytes": 0,
        }
        return {**one, **more}

    def line(samples: int, error: float) -> dict[str, Any]:
        gradients = {"errors": [error], "bf16_error": 0.01, "missing": [], "skipped_steps": 0}
        finding = {"batch_size": 8, "chose": "something", "search_seconds": 12.0}
        return {"finding": finding, "rounds": [timed(samples, gradients=gradients), timed(samples)]}

    tools = {
        "autotune": line(200, 0.01),
        "loadtune": line(100, 0.5),
        "lightning": {"failure": "ended with status 1: no such thing", "failed_after_seconds": 3.0},
    }
    text = table({"name": "rivals_x", "tiny": False, "tools": tools}).splitlines()
    assert next(one for one in text if one.startswith("autotune ")).count("right") == 1
    assert "WRONG" in next(one for one in text if one.startswith("loadtune "))
    assert "FAILED after 3 s: ended with status 1" in next(one for one in text if one.startswith("lightning "))
    assert text[-1] == "autotune over loadtune: 2.000"


def test_every_tool_of_the_table_can_be_run() -> None:
    assert tuple(TOOL_SETUPS) == TOOLS


def test_a_comparison_goes_on_from_an_earlier_call_on_such_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was started anew knows no directory for caches."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arguments: Any = SimpleNamespace(out=tmp_path, tiny=True)
    first = Comparison("resnet18", arguments)
    first.content["tools"] = {"loadtune": {"finding": {"batch_size": 8}, "rounds": []}}
    first.write()
    first.caches.rmdir()
    again = Comparison("resnet18", arguments)
    assert again.content["tools"] == first.content["tools"]
    assert again.caches.is_dir()
    first.path.write_text(json.dumps({**first.content, "machine": {"gpus": [{"name": "other", "total_bytes": 1}]}}))
    assert Comparison("resnet18", arguments).content["tools"] == {}


def test_what_is_in_use_on_a_gpu_makes_it_no_other() -> None:
    def machine(**gpu: Any) -> dict[str, Any]:
        return {"gpus": [{"name": "H200", "total_bytes": 2**37, **gpu}]}

    assert cards(machine(used_bytes=0, uuid="a")) == cards(machine(used_bytes=2**22, uuid="b"))
    assert cards(machine(total_bytes=2**36)) != cards(machine())

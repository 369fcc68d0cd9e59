"""Every example is a plain program of its own that trains, and what `Training` sets up from it trains too."""

from __future__ import annotations

import ast
import importlib.util
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from autotune.config import TrainingConfig
from autotune.records import Conditions
from autotune.training.training import Training
from autotune.workload import UserFunctions, workload_from_target

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))


@pytest.fixture(autouse=True)
def _own_thread_count() -> Iterator[None]:
    """What an example sets for its process is put back for the tests after it."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def losses(example: Any, batches: int) -> list[float]:
    """Losses of the example's own step, set up by `Training` as the program stands."""
    torch.manual_seed(0)
    functions = UserFunctions(example.model_fn, example.data_fn, example.loss_fn, example.optimizer_fn)
    training = Training(functions, TrainingConfig({}), Conditions(device="cpu", global_batch_size=None))
    return [float(training.step(window)) for window, _ in zip(training.loader, range(batches), strict=False)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_needs_torch_and_nothing_else(path: Path) -> None:
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]  # type: ignore[union-attr]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert imported - set(sys.stdlib_module_names) == {"torch"}
    assert {"model_fn", "data_fn", "loss_fn", "optimizer_fn"} == workload_from_target(str(path)).names.keys()


def test_quickstart_runs_as_a_script_and_learns() -> None:
    ran = subprocess.run([sys.executable, EXAMPLES / "quickstart.py"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    shown = [float(value) for value in re.findall(r"loss (\d+\.\d+)", ran.stdout)]
    assert len(shown) == 5
    # Unseeded, as a first program is: single batches of 16 differ widely, and a guess among ten classes costs log(10).
    assert sum(shown) / len(shown) < math.log(10) / 2


def test_quickstart_trains_under_autotune() -> None:
    shown = losses(load_example("quickstart"), batches=40)
    assert shown[0] == pytest.approx(math.log(10), abs=0.7)
    assert sum(shown[-5:]) / 5 < shown[0] / 2


@pytest.fixture
def small_gpt2(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    example = load_example("gpt2")
    config = example.GPTConfig(layers=2, heads=2, width=32, context=16, vocabulary=64)
    monkeypatch.setattr(example, "CONFIG", config)
    return example


def test_gpt2_has_124_million_parameters() -> None:
    example = load_example("gpt2")
    with torch.device("meta"):
        model = example.model_fn()
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_475_904
    assert len(model.blocks) == 12


def test_gpt2_trains_under_autotune(small_gpt2: ModuleType) -> None:
    shown = losses(small_gpt2, batches=3)
    assert shown == pytest.approx([math.log(64)] * 3, abs=0.2)


def test_gpt2_head_shares_the_embedding(small_gpt2: ModuleType) -> None:
    model = small_gpt2.model_fn()
    assert model.head.weight is model.token_embedding.weight
    groups = small_gpt2.optimizer_fn(model).param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_gpt2_does_not_look_ahead(small_gpt2: ModuleType) -> None:
    model = small_gpt2.model_fn()
    tokens = torch.randint(64, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_gpt2_targets_are_the_next_tokens(small_gpt2: ModuleType) -> None:
    data = small_gpt2.data_fn()
    assert len(data) == 4096
    (first, first_targets), (second, _) = data[0], data[1]
    torch.testing.assert_close(first[1:], first_targets[:-1])
    assert first_targets[-1] == second[0]
    with pytest.raises(IndexError):
        data[len(data)]


def test_gpt2_runs_as_a_script(small_gpt2: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    small_gpt2.main(steps=2)
    assert len(re.findall(r"step \d: loss \d", capsys.readouterr().out)) == 2


def test_resnet50_has_the_published_number_of_parameters() -> None:
    example = load_example("resnet50")
    with torch.device("meta"):
        model = example.model_fn()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert len([module for module in model.modules() if isinstance(module, example.Bottleneck)]) == 16


def test_resnet50_scores_images_of_its_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load_example("resnet50")
    monkeypatch.setattr(example, "IMAGE_SIZE", 32)
    images = example.Images(4, kept=2)
    batch = next(iter(torch.utils.data.DataLoader(images, batch_size=4)))
    loss = example.loss_fn(example.ResNet(depths=(1, 1, 1, 1)), batch)
    assert loss.item() == pytest.approx(math.log(1000), rel=0.3)
    assert batch[0].shape == (4, 3, 32, 32)
    assert -1 <= float(batch[0].min()) < float(batch[0].max()) <= 1
    with pytest.raises(IndexError):
        images[4]


@pytest.mark.parametrize("name", ["slow_loader", "small"])
def test_an_example_runs_as_a_script_and_trains_under_autotune(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = load_example(name)
    torch.set_num_threads(1)  # beside other tests, more threads would wait for each other
    example.main(steps=20)
    assert re.findall(r"step 20: loss \d", capsys.readouterr().out)
    assert all(math.isfinite(loss) for loss in losses(example, batches=2))

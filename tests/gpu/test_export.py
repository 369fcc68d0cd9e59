"""The exported script on a GPU: the losses of `Training`, step by step."""

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.api import search
from autotune.options import SearchOptions
from autotune.search.watcher import QuietWatcher
from autotune.workload import workload_from_target

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_a_search_on_the_gpu_ends_with_a_script_that_runs(tmp_path):
    program = tmp_path / "train.py"
    root = Path(__file__).parents[2]
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(root)!r})\n"
        "from tests.gpu.programs import network_model as model_fn\n"
        "from tests.gpu.programs import network_data as data_fn\n"
        "from tests.gpu.programs import classification_loss as loss_fn\n"
    )
    study = tmp_path / "study"
    options = SearchOptions(budget_seconds=60, study=study, only=("precision", "optimizer_impl"))
    result = search(workload_from_target(str(program)), options, QuietWatcher())
    assert result.recommendation.machine.gpus
    assert result.best.confirmed_rounds > 0
    exported = subprocess.run(
        [sys.executable, "-m", "autotune.cli", "export", str(study / "best.json"), "--to", "python"],
        capture_output=True,
        text=True,
        check=True,
    )
    script = tmp_path / "plain.py"
    script.write_text(exported.stdout)
    assert "import autotune" not in exported.stdout
    assert "from autotune" not in exported.stdout
    finished = subprocess.run(
        [sys.executable, "-c", "import plain; print(*(float(loss) for _, loss in zip(range(3), plain.train())))"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    losses = [float(word) for word in finished.stdout.split()]
    assert len(losses) == 3
    assert all(0 < loss < 10 for loss in losses)

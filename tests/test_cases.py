"""Programs with a trouble of their own, through the command line: what is said, and what is left behind."""

import subprocess
import sys
import textwrap

import pytest

LINEAR = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    def model_fn():
        return nn.Linear(4, 1)

    def data_fn():
        x = torch.randn(64, 4)
        return DataLoader(TensorDataset(x, x[:, :1]), batch_size=8)

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.fixture
def run(tmp_path):
    """Runs a command on a program made of `LINEAR` and what replaces parts of it; gives the finished process."""

    def run_program(source, command, *options):
        (tmp_path / "program.py").write_text(textwrap.dedent(LINEAR) + textwrap.dedent(source))
        arguments = [sys.executable, "-m", "autotune.cli", command, "program.py", *options]
        return subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)

    return run_program


def test_a_failing_second_model_shows_the_users_line_and_leaves_nothing(run, tmp_path):
    finished = run(
        """
        SIZES = [4]

        def model_fn():
            return nn.Linear(SIZES.pop(), 1)
        """,
        "check",
    )
    assert finished.returncode == 2
    assert "model_fn failed at its second call (IndexError: pop from empty list)" in finished.stderr
    assert "return nn.Linear(SIZES.pop(), 1)" in finished.stderr
    assert "what it printed" not in finished.stderr, "it printed nothing"
    assert not (tmp_path / "__pycache__").exists()

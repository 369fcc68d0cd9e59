"""`autotune verify` with real processes: a result that holds, one whose program trains differently now, one that gains
nothing any more; and that none of it opens a connection to anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import autotune
from autotune.config import TrainingConfig
from autotune.knobs.registry import KNOBS
from autotune.machine import read_machine_facts
from autotune.measurement.facts import read_facts
from autotune.options import VerifyReport
from autotune.records import Conditions, Ratio, SearchFacts, TrialRequest
from autotune.result import TuningResult
from autotune.workload import load_functions, workload_from_target
from tests.report import sample_records
from tests.running_search import RunningSearch, gone

ROOT = Path(__file__).parent.parent
PROGRAM = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Samples(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        time.sleep(0.01)
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x[:1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.last(hidden)


def model_fn():
    return Net()


def data_fn():
    return DataLoader(Samples(), batch_size=8)


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
SKIPS_UNDER_AUTOCAST = PROGRAM.replace(
    "return self.last(hidden)", "return self.last(hidden * 0 if torch.is_autocast_enabled('cpu') else hidden)"
)
LOADS_AT_ONCE = PROGRAM.replace("time.sleep(0.01)", "pass")
REACHES_OUT = """
import socket

try:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
except OSError:
    pass
"""

AUDITED = """
import os, socket, sys

def _audit(event, arguments):
    resolves = event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
    reaches = event in ("socket.connect", "socket.sendto", "socket.sendmsg")
    if resolves or (reaches and arguments[0].family != socket.AF_UNIX):
        with open(os.environ["AUDIT_FILE"], "a") as file:
            file.write(f"{event} {arguments[1:]}\\n")

sys.addaudithook(_audit)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program and a result that recommends four workers and bf16 for it, as a search would have left it."""
    directory = tmp_path_factory.mktemp("verified")
    program = directory / "train.py"
    program.write_text(PROGRAM)
    workload = workload_from_target(str(program))
    conditions = Conditions(device="cpu", global_batch_size=8)
    request = TrialRequest(kind="facts", config=TrainingConfig({}), conditions=conditions)
    machine = read_machine_facts()
    facts = read_facts(load_functions(workload), request, lambda phase: None)
    known = SearchFacts(
        machine=machine, workload=facts, device="cpu", global_batch_size=8, largest_batch_size=512
    )  # fmt: skip
    baseline = TrainingConfig({knob.name: knob.baseline(known) for knob in KNOBS})
    best = baseline.replace({"num_workers": 4, "precision": "bf16"})
    sample = sample_records.recommendation()
    answers = {
        "baseline": sample.baseline.model_copy(update={"config": baseline}),
        "best": sample.best.model_copy(update={"config": best, "speedup": Ratio(value=3.4, interval=(3.0, 3.8))}),
    }
    claimed = sample.model_copy(
        update={
            **answers, "machine": machine, "workload": facts, "reference": workload.reference(),
            "settings": sample.settings.model_copy(update={"conditions": conditions}),
            "autotune_version": autotune.__version__,
        }
    )  # fmt: skip
    TuningResult(claimed).save(directory / "best.json")
    (directory / "audit").mkdir()
    (directory / "audit" / "sitecustomize.py").write_text(AUDITED)
    return directory


def verified(place: Path, source: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The command's end, and the connections that any of its processes tried to make."""
    (place / "train.py").write_text(source)
    tried = place / "connections"
    tried.unlink(missing_ok=True)
    environment = {
        **os.environ, "PYTHONPATH": f"{place / 'audit'}{os.pathsep}{ROOT}", "AUDIT_FILE": str(tried),
        "TMPDIR": str(place / "temporary"),
    }  # fmt: skip
    (place / "temporary").mkdir(exist_ok=True)
    ended = subprocess.run(
        [sys.executable, "-m", "autotune.cli", "verify", "best.json", "--budget", "6s", *arguments],
        cwd=place, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    return ended, tried.read_text().splitlines() if tried.exists() else []


def test_a_result_that_holds_ends_with_0_and_leaves_nothing(place: Path) -> None:
    ended, connections = verified(place, PROGRAM, "--json")
    assert ended.returncode == 0, ended.stderr
    report = VerifyReport.model_validate_json(ended.stdout)
    assert report.outcome in ("holds", "holds_differently")
    assert report.changed == ()
    assert report.best is not None and report.best.speedup.interval[0] > 1
    assert report.parity is not None and report.parity.passed
    assert f"note: the program is {place / 'train.py'}" in ended.stderr
    assert connections == [], "nothing leaves the machine"
    assert os.listdir(place / "temporary") == []


def test_a_model_that_trains_differently_now_is_noticed(place: Path) -> None:
    ended, connections = verified(place, SKIPS_UNDER_AUTOCAST + REACHES_OUT)
    assert any(line.startswith("socket.connect") for line in connections), "the test above would have seen one"
    assert ended.returncode == 1, ended.stderr
    told = " ".join(ended.stdout.split())
    assert told.startswith("It no longer holds: num_workers=4, precision=bf16 trains differently now: ")
    assert "Changed since - the source of " in told


def test_what_gains_nothing_any_more_ends_with_1(place: Path) -> None:
    ended, _ = verified(place, LOADS_AT_ONCE, "train.py", "--json")
    assert ended.returncode == 1, ended.stderr
    report = VerifyReport.model_validate_json(ended.stdout)
    assert report.outcome == "no_longer_better"
    assert report.best is not None and report.best.speedup.value < 1.02


def test_ctrl_c_is_a_sentence_and_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "train.py").write_text(PROGRAM)
    (place / "interrupted").mkdir()
    monkeypatch.setenv("TMPDIR", str(place / "interrupted"))
    running = RunningSearch("verify", "best.json", directory=place)
    running.wait_for("trial 0: your settings")
    started = running.descendants(at_least=1)
    running.interrupt()
    assert running.end() == 130
    assert running.lines[-1] == "autotune: interrupted; nothing is said about the result, which stays as it is"
    assert gone(started)
    assert os.listdir(place / "interrupted") == []

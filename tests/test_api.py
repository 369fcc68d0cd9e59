"""`fit` from scripts and from functions that only exist in memory; what is asked wrongly is told in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import autotune
from autotune import api, sessions
from autotune.config import TrainingConfig
from autotune.errors import UserError
from autotune.machine import read_machine_facts
from autotune.options import SearchOptions
from autotune.processes.pool import TrialPool
from autotune.records import Conditions, TrialAnswer, TrialRequest
from autotune.search.search import Search
from autotune.search.study import stored_records
from autotune.search.watcher import QuietWatcher
from autotune.workload import workload_from_target
from tests.knobs.search_facts import cpu_facts
from tests.running_search import TINY_PROGRAM
from tests.search.simulated_machine import Program
from tests.search.simulated_search import SimulatedSearch

WITHOUT_GUARD = (
    "import time\nbegan = time.monotonic()\nimport autotune\n"
    + TINY_PROGRAM
    + """
print("the script starts", flush=True)
budget = min(230, max(30, 12 * (time.monotonic() - began)))  # by what importing torch takes on so busy a machine
closed_over = [loss_fn, 1.0]
best = autotune.fit(
    model_fn, data_fn, loss_fn=lambda model, batch: closed_over[0](model, batch) * closed_over[1], budget=budget, trials=2,
    space="quick", only=("optimizer_impl",), study="here", quiet=True,
)
print(best.recommendation.verdict)
training = best.build(model_fn, data_fn, loss_fn=loss_fn)
before = [parameter.detach().clone() for parameter in training.model.parameters()]
losses = [float(training.step(window)) for window, _ in zip(training.loader, range(8))]
assert len(losses) == 8 and all(0 < loss < 100 for loss in losses), losses
assert not any(torch.equal(now, then) for now, then in zip(training.model.parameters(), before))
torch.save(training.model.state_dict(), "checkpoint.pt")
report = autotune.verify(best, model_fn, data_fn, loss_fn=loss_fn, budget=5, quiet=True)
assert report.baseline.samples_per_second > 0 and report.changed == (), report
print("verified:", report.verdict)
"""
)
"""Its functions exist in `__main__` alone, one of them is a lambda, and importing it again would run it again."""


def python(source: str, directory: Path) -> subprocess.CompletedProcess[str]:
    (directory / "script.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.run(
        [sys.executable, "script.py"], cwd=directory, env=environment, capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip


# --- fit --------------------------------------------------------------------------------------------------------------


def test_a_script_without_a_guard_runs_once_trains_and_saves_what_the_plain_model_loads(tmp_path: Path) -> None:
    ended = python(WITHOUT_GUARD, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("the script starts") == 1
    assert "Traceback" not in ended.stderr
    assert "verified: It " in ended.stdout
    result = autotune.load(tmp_path / "here" / "best.json")
    assert result.recommendation.verdict in ended.stdout
    assert result.best.confirmed_rounds >= 1
    trials, _ = stored_records(tmp_path / "here")
    assert sum(trial.round is None for trial in trials) <= 2
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    plain.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))


def test_fit_in_a_child_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CHILD", "1")
    with pytest.raises(UserError, match='Put the call under `if __name__ == "__main__":`'):
        autotune.fit(lambda: None, lambda: None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": "soon"}, "'soon' is not a time"),
        ({"memory_limit": "much"}, "'much' is not a size"),
        ({"space": "hughe"}, "there is no search space 'hughe'; known are default, loader, memory, quick, thorough"),
        ({"only": ("speed",)}, "there is no knob 'speed'; known are batch_size"),
        ({"fix": {"precision": "int3"}}, "precision has no value 'int3'; known are as_is, tf32, bf16, fp16"),
        ({"fix": {"num_workers": -1}}, "num_workers must be at least 0, not -1"),
        ({"device": "cuda"}, "--device cuda: this machine shows no GPU"),
        ({"study": "a-file"}, "cannot keep a study in a-file: File exists; choose another directory with --study"),
        ({"study": "a-file/below"}, "cannot keep a study in a-file/below: Not a directory"),
        (
            {"study": "broken"},
            "broken/study.db cannot be used as a study (file is not a database); choose another --study",
        ),
    ],
)
def test_what_is_asked_wrongly_is_told_before_anything_runs(
    options: dict[str, object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "device" in options and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "study.db").write_text("no database, and long enough to be looked at\n" * 40)
    monkeypatch.setattr(TrialPool, "start", must_not_start)
    with pytest.raises(ValueError) as told:  # noqa: PT011  # the text is what is looked at
        autotune.fit(lambda: None, lambda: None, **{"study": "here", "quiet": True, **options})  # type: ignore[arg-type]
    assert sentence in str(told.value)


def must_not_start(pool: TrialPool) -> None:
    raise AssertionError("a process was started")


# --- the user's program is at fault -----------------------------------------------------------------------------------

MODEL = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))"
DATA = "DataLoader(TensorDataset(x, x[:, :1]), batch_size=16)"
LOSS = "nn.functional.mse_loss(model(batch[0]), batch[1])"
FAULTS = {
    "the same model twice": (MODEL, "SHARED", "model_fn returned the same model twice"),
    "no model": (MODEL, "3", "model_fn returned int"),
    "fails at its second call": (MODEL, f"next(CALLS) or {MODEL}", "model_fn failed at its second call (StopIteration"),
    "nothing to train": (MODEL, f"{MODEL}.requires_grad_(False)", "no parameter that requires a gradient"),
    "empty": (DATA, DATA.replace("x, x[:, :1]", "x[:0], x[:0]"), "data_fn returned a loader over an empty data set"),
    "smaller than the batch": (DATA, DATA.replace("16", "1024, drop_last=True"), "512 samples, batch 1024, drop_last"),
    "a vector": (LOSS, LOSS.replace("[1])", "[1], reduction='none')"), "loss_fn returned a tensor of shape [16, 1]"),
    "a number": (LOSS, f"{LOSS}.item()", "loss_fn returned a float"),
    "no gradient": (LOSS, f"{LOSS}.detach()", "loss_fn returned a scalar without a gradient"),
    "not a number": (LOSS, f"{LOSS} * float('nan')", "the user's own step gives a loss of nan at its first step"),
    "raises": (LOSS, "undefined", "NameError: name 'undefined' is not defined"),
}


@pytest.fixture(scope="module")
def changing_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One program that a single server serves: each trial reads what its functions do from a file beside it."""
    directory = tmp_path_factory.mktemp("faults")
    lines = {name: f'eval((HERE / "{name}").read_text())' for name in ("model", "data", "loss")}
    source = TINY_PROGRAM.replace(MODEL, lines["model"]).replace(DATA, lines["data"]).replace(LOSS, lines["loss"])
    assert source.count("eval") == 3
    source += (
        "\nfrom pathlib import Path\nHERE = Path(__file__).parent\nCALLS = iter([None])\nSHARED = nn.Linear(8, 1)\n"
    )
    # A generator expression or a closure would not see the function's own variables within eval.
    (directory / "program.py").write_text(source)
    return directory


@pytest.fixture(scope="module")
def pool(changing_program: Path, tmp_path_factory: pytest.TempPathFactory) -> TrialPool:
    """Closed at the end of the module."""
    made = TrialPool(workload_from_target(str(changing_program / "program.py")), tmp_path_factory.mktemp("logs"))
    yield made  # type: ignore[misc]
    made.close()


@pytest.mark.parametrize("name", FAULTS)
def test_a_program_at_fault_is_told_in_a_sentence(name: str, changing_program: Path, pool: TrialPool) -> None:
    replaced, replacement, sentence = FAULTS[name]
    for file, source in (("model", MODEL), ("data", DATA), ("loss", LOSS)):
        (changing_program / file).write_text(replacement if source == replaced else source)
    request = TrialRequest(
        kind="facts", config=TrainingConfig({}), conditions=Conditions(device="cpu", global_batch_size=None)
    )
    failure = pool.run(request).failure
    assert failure is not None
    with pytest.raises(UserError) as told:
        sessions.raise_failure(failure)
    assert sentence in str(told.value)
    assert "autotune/" not in told.value.detail, "our own frames are nobody's business"


def test_a_global_batch_that_no_step_could_take_is_refused(changing_program: Path, pool: TrialPool) -> None:
    for file, source in (("model", MODEL), ("data", DATA), ("loss", LOSS)):
        (changing_program / file).write_text(source)
    options = SearchOptions(device="cpu", global_batch_size=513)
    conditions = Conditions(device="cpu", global_batch_size=513)
    with pytest.raises(UserError, match="a global batch of 513 is more than the 512 samples of the data set"):
        sessions._facts(pool, read_machine_facts(), conditions, options)


def test_a_file_that_cannot_be_imported_shows_the_users_frame_alone(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(TINY_PROGRAM + "\nimport no_such_module\n")
    ended = subprocess.run(
        [sys.executable, "-m", "autotune.cli", "search", "broken.py", "--study", "here"],
        cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    told = [line for line in ended.stderr.splitlines() if not line.startswith(("stage", "note"))]
    assert told[0].startswith("autotune: error: importing ")
    assert "No module named 'no_such_module'" in told[0]
    assert any(line.strip() == "import no_such_module" for line in told)
    assert not any("autotune/" in line and "File" in line for line in told)


def test_a_budget_that_holds_no_search_says_what_would(tmp_path: Path) -> None:
    """Of a program that makes errors of warnings, too: those are its own, and the measurement comes to its end."""
    strict = "import warnings\nwarnings.simplefilter('error', DeprecationWarning)\n"
    (tmp_path / "tiny.py").write_text(strict + TINY_PROGRAM)
    ended = subprocess.run(
        [sys.executable, "-m", "autotune.cli", "search", "tiny.py", "--budget", "1s", "--study", "here"],
        cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    told = ended.stderr.splitlines()[-1]
    assert told.startswith("autotune: error: a budget of 1 s is too small: measuring your own program took ")
    assert "Give at least --budget" in told
    assert told.endswith("what was measured is kept")
    trials, _ = stored_records(tmp_path / "here")
    assert len(trials) == 1


def test_what_is_left_is_enough_where_a_candidate_and_a_round_fit(tmp_path: Path) -> None:
    """Of 42 s a busy machine took 6.5 to start and 10 for the baseline, which three more of would not fit."""
    program = Program(
        sample_seconds=0.002, sample_speedups={("precision", "bf16"): 3.0}, start_seconds=7.0, block_spread=0.3
    )
    search = SimulatedSearch(
        program, cpu_facts(batch_size=16, usable_cores=2), tmp_path, budget_seconds=42.0, started_seconds=6.5
    )
    session = search.session()
    try:
        api._run(Search(session), time.monotonic())
    finally:
        session.study.close()
    baseline = session.baseline_trial()
    assert baseline is not None
    assert 42.0 - 6.5 - baseline.seconds < 3 * baseline.seconds
    assert {trial.config for trial in session.trials if trial.measurement is not None} > {session.baseline}
    assert session.budget.elapsed() < 1.15 * 42.0


BF16 = {"precision": "bf16"}


def gone_on(directory: Path, budget_seconds: float) -> SimulatedSearch:
    """A search that goes on there, after starting took 2 s."""
    program = Program(sample_seconds=0.002, sample_speedups={("precision", "bf16"): 3.0}, start_seconds=1.0)
    search = SimulatedSearch(
        program, cpu_facts(batch_size=16, usable_cores=2), directory, budget_seconds=budget_seconds, started_seconds=2.0
    )
    session = search.session()
    try:
        api._run(Search(session), time.monotonic())
    finally:
        session.study.close()
    assert session.baseline is not None
    search.found = session.results().best().config.changes_from(session.baseline)  # type: ignore[attr-defined]
    return search


def begun(directory: Path, *, measured: bool = False, rounds: int = 0) -> None:
    """What a call left that ended after its baseline, after a trial, or after rounds of it."""
    program = Program(sample_seconds=0.002, sample_speedups={("precision", "bf16"): 3.0}, start_seconds=1.0)
    search = SimulatedSearch(program, cpu_facts(batch_size=16, usable_cores=2), directory)
    with search.begun() as session:
        config = search.space.baseline.replace(BF16)
        if measured:
            session.measure(config, "compute")
        for number in range(rounds):
            for one in (search.space.baseline, config):
                session.measure_again(one, "confirm", confirm_round=number)


@pytest.mark.parametrize("measured", [False, True])
def test_going_on_refuses_a_budget_that_can_give_no_answer(measured: bool, tmp_path: Path) -> None:
    begun(tmp_path, measured=measured)
    with pytest.raises(UserError, match=r"a budget of 4 s is too small: starting took 0 s\. Give .* measured is kept$"):
        gone_on(tmp_path, 4.0)


def test_going_on_after_other_trials_needs_the_time_of_a_round_alone(tmp_path: Path) -> None:
    """Another trial, and rounds beside the baseline, would take longer."""
    for name, measured in (("baseline", False), ("searched", True)):
        (tmp_path / name).mkdir()
        begun(tmp_path / name, measured=measured)
    with pytest.raises(UserError, match="too small"):
        gone_on(tmp_path / "baseline", 8.5)
    search = gone_on(tmp_path / "searched", 8.5)
    assert search.found == BF16  # type: ignore[attr-defined]


def test_going_on_after_a_round_gives_what_it_showed_and_measures_nothing_that_there_is_no_time_for(
    tmp_path: Path,
) -> None:
    begun(tmp_path, measured=True, rounds=2)
    search = gone_on(tmp_path, 3.0)
    assert search.found == BF16  # type: ignore[attr-defined]
    assert [request for request in search.machine.requests if request.kind == "measure"] == []


@pytest.mark.parametrize(("budget_seconds", "spared"), [(600.0, False), (1e-6, True)])
def test_a_search_that_has_no_time_to_compile_imports_no_compiler(
    budget_seconds: float, spared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    class Pool(TrialPool):
        def begin(self) -> None:
            """Starts nothing."""

        def start(self) -> None:
            """Nothing is there to wait for."""

        def spare_the_compiler(self) -> None:
            """Noted."""
            told.append("spared")

        def run(self, *_: object, **__: object) -> TrialAnswer:
            """Ends the search."""
            raise UserError("enough")

    (tmp_path / "tiny.py").write_text(TINY_PROGRAM)
    monkeypatch.setattr(sessions, "TrialPool", Pool)
    options = SearchOptions(device="cpu", study=tmp_path / "here", budget_seconds=budget_seconds)
    with pytest.raises(UserError, match="enough"):
        api.search(workload_from_target(str(tmp_path / "tiny.py")), options, QuietWatcher())
    assert bool(told) == spared


# --- check and memory -------------------------------------------------------------------------------------------------


def test_check_and_memory_answer_without_a_study(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY_PROGRAM)
    for command, expected in (("check", "Your program is understood"), ("memory", "It fits: your batch is 16")):
        ended = subprocess.run(
            [sys.executable, "-m", "autotune.cli", command, "tiny.py"],
            cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert expected in ended.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"tiny.py", "__pycache__"}


def test_a_look_at_the_program_waits_for_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which `check` would do at its end: nothing is compiled there, and a search alone has use for it."""
    (tmp_path / "tiny.py").write_text(TINY_PROGRAM)
    asked = []

    def refuse(*_: object, warm_compiler: bool, **__: object) -> TrialPool:
        asked.append(warm_compiler)
        raise UserError("enough")

    monkeypatch.setattr(sessions, "TrialPool", refuse)
    workload = workload_from_target(str(tmp_path / "tiny.py"))
    for look in (api.check, api.search):
        with pytest.raises(UserError, match="enough"):
            look(workload, SearchOptions(device="cpu", study=tmp_path / "here"), QuietWatcher())
    assert asked == [False, True]

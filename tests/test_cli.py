from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli import Api, run
from autotune.config import TrainingConfig
from autotune.errors import NoAnswerError, SearchInterrupted, UserError
from autotune.export.json import export
from autotune.options import CheckReport, MemoryReport, SearchOptions, VerifyOutcome, VerifyReport
from autotune.records import OtherSearch, Probe, Recommendation, Trial, WorkloadReference
from autotune.result import TuningResult
from autotune.search.watcher import SearchWatcher
from autotune.workload import Workload
from tests.export.test_python import gpu_recommendation
from tests.report.sample_records import ceiling, recommendation, search_facts, trial, verify_report


class RecordedApi:
    """Answers at once, with what it was told to, and keeps what it was asked. Nothing is searched."""

    def __init__(self, outcome: BaseException | None = None) -> None:
        self.outcome = outcome
        self.asked: list[tuple[str, str, SearchOptions]] = []
        self.loaded = recommendation()
        self.verified = verify_report()

    def _ask(self, what: str, workload: Workload, options: SearchOptions, watcher: SearchWatcher) -> None:
        self.asked.append((what, workload.location, options))
        watcher.note(f"{what} is under way")
        if self.outcome is not None:
            raise self.outcome

    def search(self, workload: Workload, options: SearchOptions, watcher: SearchWatcher) -> TuningResult:
        self._ask("search", workload, options, watcher)
        return TuningResult(recommendation())

    def check(self, workload: Workload, options: SearchOptions, watcher: SearchWatcher) -> CheckReport:
        self._ask("check", workload, options, watcher)
        return CheckReport(
            facts=search_facts(), offered={}, refused=(), estimated_search_seconds=600, budget_seconds=600
        )

    def memory(self, workload: Workload, options: SearchOptions, watcher: SearchWatcher) -> MemoryReport:
        self._ask("memory", workload, options, watcher)
        own = ceiling(memory_class={})
        return MemoryReport(facts=search_facts(), baseline=TrainingConfig({}), ceilings=(own,), limit_bytes=None)

    def verify_workload(
        self, claimed: Recommendation, workload: Workload, budget_seconds: float, watcher: SearchWatcher
    ) -> VerifyReport:
        assert claimed == self.loaded
        self._ask("verify", workload, SearchOptions(budget_seconds=budget_seconds), watcher)
        return self.verified

    def load(self, path: Path) -> TuningResult:
        if isinstance(self.outcome, UserError):
            raise self.outcome
        return TuningResult(self.loaded)

    def open_study(self, directory: Path) -> tuple[Recommendation | None, list[Trial], list[Probe]]:
        return recommendation(), [trial(0, {}, rate=1000.0, stage="baseline")], []

    def other_searches(self, directory: Path) -> tuple[OtherSearch, ...]:
        return (OtherSearch(last_started_at=1.8e9, trial_count=5, differences=("seed: 1 then, 0 now",)),)


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("def model_fn(): ...\ndef data_fn(): ...\n")
    return str(path)


def outcome(api: RecordedApi, *argv: str) -> int:
    return run(list(argv), lambda: api)


def must_not_load() -> Api:
    raise AssertionError("the command needs no api")


def test_a_search_shows_its_recommendation_and_progress_apart(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    api = RecordedApi()
    assert outcome(api, "search", program, "--study", "here", "--budget", "90s") == 0
    assert api.asked == [("search", program, SearchOptions(budget_seconds=90, study=Path("here")))]
    printed = capsys.readouterr()
    assert printed.out.startswith(recommendation().verdict)
    assert "autotune export here/best.json --to python" in printed.out
    assert printed.err == "note: search is under way\n"


def test_json_on_stdout_is_the_record_and_nothing_else(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(RecordedApi(), "search", program, "--json") == 0
    assert Recommendation.model_validate_json(capsys.readouterr().out) == recommendation()
    assert outcome(RecordedApi(), "check", program, "--json") == 0
    assert CheckReport.model_validate_json(capsys.readouterr().out).estimated_search_seconds == 600
    assert outcome(RecordedApi(), "memory", program, "--json") == 0
    assert json.loads(capsys.readouterr().out)["ceilings"][0]["largest_batch_size"] == 176


def test_check_and_memory_are_reported(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(RecordedApi(), "check", program) == 0
    assert "Your program is understood" in capsys.readouterr().out
    assert outcome(RecordedApi(), "memory", program) == 0
    assert "It fits: your batch is 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("outcome_", "exit_code"),
    [
        ("holds", 0), ("holds_differently", 0), ("no_longer_better", 1), ("trains_differently", 1),
        ("no_longer_runs", 1), ("unclear", 1),
    ],
)  # fmt: skip
def test_the_exit_code_of_verify_is_its_answer(
    outcome_: VerifyOutcome, exit_code: int, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    api = RecordedApi()
    api.verified = verify_report(outcome=outcome_)
    assert outcome(api, "verify", "best.json", program, "--budget", "90s") == exit_code
    assert api.asked == [("verify", program, SearchOptions(budget_seconds=90))]
    printed = capsys.readouterr()
    assert printed.out.startswith("It holds: precision=bf16")
    assert printed.err.startswith(f"note: the program is {program}\n")
    assert outcome(api, "verify", "best.json", program, "--json") == exit_code
    assert VerifyReport.model_validate_json(capsys.readouterr().out) == api.verified


def test_verify_finds_the_program_that_the_result_names(program: str) -> None:
    api = RecordedApi()
    names = {"model_fn": "model_fn", "data_fn": "data_fn"}
    reference = api.loaded.reference.model_copy(update={"location": program, "names": names})
    api.loaded = api.loaded.model_copy(update={"reference": reference})
    assert outcome(api, "verify", "best.json") == 0
    assert api.asked == [("verify", program, SearchOptions(budget_seconds=300))]


def test_verify_interrupted_is_a_sentence(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(RecordedApi(KeyboardInterrupt()), "verify", "best.json", program) == 130
    assert capsys.readouterr().err.endswith(
        "autotune: interrupted; nothing is said about the result, which stays as it is\n"
    )


def test_an_interrupted_search_shows_the_best_so_far(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    best = SearchInterrupted(TuningResult(recommendation()))
    assert outcome(RecordedApi(best), "search", program) == 130
    printed = capsys.readouterr()
    assert printed.out.startswith(recommendation().verdict)
    assert "autotune: interrupted; the best so far is kept, and the same command goes on where this one" in printed.err


def test_an_interrupted_search_without_a_baseline_says_so(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(RecordedApi(SearchInterrupted(None)), "search", program) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "autotune: interrupted; nothing new was measured" in printed.err


def test_a_plain_interrupt_is_no_traceback(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(RecordedApi(KeyboardInterrupt()), "check", program) == 130
    assert capsys.readouterr().err.endswith("autotune: interrupted\n")


def test_the_users_fault_is_a_sentence_and_their_own_frames(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    frames = '  File "train.py", line 3, in model_fn\n    boom()\n'
    assert outcome(RecordedApi(UserError("model_fn raised NameError: boom", frames)), "search", program) == 2
    assert capsys.readouterr().err == (
        f"note: search is under way\nautotune: error: model_fn raised NameError: boom\n{frames}"
    )


def test_foreign_text_does_not_steer_the_terminal(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = UserError("RuntimeError: \x1b[31mred\x07", "  File\n\t\x1b]0;title\x07 [bold]\n")
    assert outcome(RecordedApi(error), "search", program) == 2
    assert capsys.readouterr().err.endswith("autotune: error: RuntimeError: [31mred\n  File\n    ]0;title [bold]\n")


def test_any_value_error_is_the_users(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(RecordedApi(ValueError("there is no knob 'x'")), "search", program) == 2
    assert capsys.readouterr().err.endswith("autotune: error: there is no knob 'x'\n")


def test_no_answer_is_told_apart_from_the_users_fault(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(RecordedApi(NoAnswerError("no trial survived", "the last lines")), "search", program) == 1
    assert capsys.readouterr().err.endswith("autotune: error: no trial survived\nthe last lines\n")


def test_a_path_that_cannot_be_used_is_a_sentence(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(RecordedApi(PermissionError(13, "Permission denied", "/closed/x")), "search", program) == 2
    assert capsys.readouterr().err.endswith("autotune: error: cannot use /closed/x: Permission denied\n")


def test_our_own_mistakes_are_not_hidden(program: str) -> None:
    with pytest.raises(AssertionError, match="ours"):
        outcome(RecordedApi(AssertionError("ours")), "search", program)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["search", "missing.py"], "no such file: missing.py"),
        (["search", "/proc/self/mem"], "cannot read /proc/self/mem: Input/output error"),
        (["check", "x" * 300 + ".py"], "xxx.py: File name too long"),
        (["show", "x" * 300], "xxx: File name too long"),
        (["search", "train.py", "--budget", "soon"], "'soon' is not a time"),
        (["search", "train.py", "--fix", "batch_size"], "argument --fix: 'batch_size' is not an assignment"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_input_ends_before_anything_is_loaded(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv, must_not_load) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("autotune: error: ")
    assert sentence in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_strategy_that_needs_what_is_not_installed_ends_before_anything_is_loaded(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["search", program, "--strategy", "gp"], must_not_load) == 2
    told = "autotune: error: --strategy gp needs scipy, which is not installed; install torch-autotune[gp]\n"
    assert capsys.readouterr().err == told


def test_a_file_without_the_functions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "half.py").write_text("def model_fn(): ...\n")
    assert run(["check", str(tmp_path / "half.py")], must_not_load) == 2
    assert "does not define data_fn" in capsys.readouterr().err


def test_show_lists_the_trials(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(RecordedApi(), "show", "study") == 0
    printed = capsys.readouterr().out
    assert "Trials of study" in printed
    assert "5 trials: seed: 1 then, 0 now" in printed


def test_show_shows_a_result_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "best.json").write_text("{}")
    assert outcome(RecordedApi(), "show", str(tmp_path / "best.json")) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(recommendation().verdict)
    assert "loss of each step, yours in fp32: 2.303 2.251" in printed


def test_export_prints_the_form_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(RecordedApi(), "export", "best.json", "--to", "json") == 0
    assert capsys.readouterr().out == export(recommendation())


def test_export_of_the_second_answer(capsys: pytest.CaptureFixture[str]) -> None:
    api = RecordedApi()
    found, config = gpu_recommendation()
    free = found.best.model_copy(update={"config": config.replace({"batch_size": 96})})
    api.loaded = found.model_copy(update={"best": found.best.model_copy(update={"config": config}), "free_batch": free})
    assert outcome(api, "export", "best.json", "--to", "python", "--free-batch") == 0
    assert "batch_size=96" in capsys.readouterr().out
    assert outcome(api, "export", "best.json", "--to", "python") == 0
    assert "batch_size=96" not in capsys.readouterr().out


@pytest.mark.parametrize("form", ["python", "json"])
def test_export_of_a_second_answer_that_is_not_there(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(RecordedApi(), "export", "best.json", "--to", form, "--free-batch") == 2
    printed = capsys.readouterr()
    told = "autotune: error: best.json has no second answer with the batch free; leave --free-batch out\n"
    assert (printed.out, printed.err) == ("", told)


def test_a_script_that_lacks_functions_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    api = RecordedApi()
    by_value = WorkloadReference(form="value", location="notebook", names={"model_fn": "net"}, source_hash="")
    found, config = gpu_recommendation()
    api.loaded = found.model_copy(
        update={"reference": by_value, "best": found.best.model_copy(update={"config": config})}
    )
    assert outcome(api, "export", "best.json", "--to", "python") == 0
    printed = capsys.readouterr()
    assert "# PASTE HERE the definitions of model_fn." in printed.out
    said = (
        "the script lacks model_fn, which cannot be imported from where fit was given them: put them where it says so"
    )
    assert printed.err == f"autotune: {said}\n"


def test_the_forms_are_the_public_modules_of_the_export_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["export", "--help"], must_not_load)
    forms = re.search(r"--to \{(.*)\}", capsys.readouterr().out)
    assert forms is not None
    assert {"json", "python"} <= set(forms[1].split(","))
    assert not any(form.startswith("_") for form in forms[1].split(","))


def test_export_of_no_result_is_the_users_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(RecordedApi(UserError("best.json is not a result")), "export", "best.json", "--to", "json") == 2
    assert capsys.readouterr().err == "autotune: error: best.json is not a result\n"


def test_knobs_and_spaces_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["knobs"], must_not_load) == 0
    assert "  - precision: " in capsys.readouterr().out
    assert run(["spaces"], must_not_load) == 0
    assert "  - quick: " in capsys.readouterr().out


def test_help_and_lists_are_quick_and_import_no_torch() -> None:
    code = (
        "import sys; from autotune.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as done:\n    assert done.code == 0\n"
        "heavy = {'torch', 'optuna', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for argv in (["--help"], ["search", "--help"], ["--version"], ["knobs"], ["spaces"]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        # A third of a second, of the processor's own time: a busy machine makes it little longer.
        assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 3


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("search", "train.py", "--study", "here"),
         "cannot write the output: No space left on device; the answer is kept, and `autotune show here` tells it"),
        (("search", "train.py", "--study", "here", "--json"),
         "cannot write the output: No space left on device; the answer is kept, and `autotune show here` tells it"),
        (("search", "train.py"), "cannot write the output: No space left on device; the answer is kept, and "
         "`autotune show autotune-study` tells it"),
        (("show", "here"), "cannot write the output: No space left on device"),
        (("export", "best.json", "--to", "json"), "cannot write the output: No space left on device"),
        (("knobs",), "cannot write the output: No space left on device"),
    ],
)  # fmt: skip
def test_an_output_that_is_full_is_told_in_a_sentence(
    argv: tuple[str, ...],
    sentence: str,
    program: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(Path(program).parent)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert outcome(RecordedApi(), *argv) == 1
    assert [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note")] == [
        f"autotune: error: {sentence}"
    ]


def test_progress_and_complaints_that_cannot_be_written_end_no_search(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert outcome(RecordedApi(), "search", program) == 0
        assert capsys.readouterr().out.startswith(recommendation().verdict)
        assert outcome(RecordedApi(UserError("no")), "search", program) == 2
        monkeypatch.undo()


def test_a_reader_that_has_seen_enough_is_no_complaint() -> None:
    command = f"{sys.executable} -m autotune.cli knobs | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["1>&-", "0<&- 1>&- 2>&-"])
def test_streams_that_are_closed_lead_nowhere(closed: str) -> None:
    command = f'"{sys.executable}" -m autotune.cli spaces {closed}'
    ended = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=400, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")

"""What is safe: a preset is data, an export quotes what it was told, pickles stay between us and our own child."""

from __future__ import annotations

import ast
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from autotune.config import TrainingConfig
from autotune.errors import UserError
from autotune.export.json import export as export_json
from autotune.export.python import export as export_python
from autotune.processes.pool import TrialPool
from autotune.records import Conditions, Failure, TrialRequest
from autotune.report.document import Grid, Lines, Sentence, Verbatim
from autotune.report.recommendation import recommendation_document
from autotune.report.terminal import LiveView, show
from autotune.report.text import describe, render
from autotune.space import SpaceError, refuse_unknown
from autotune.workload import workload_from_functions
from tests.report.sample_records import parity, recommendation, trial
from tests.test_result import recommendation as whole_recommendation

STEERING = "\x1b[2J\x1b]0;owned\x07 [bold]x[/] [/] :smile: \u202e\x9b31m"
SEEN = "[2J]0;owned [bold]x[/] [/] :smile: 31m"
INJECTION = '\'"""); __import__("os").system("touch owned") #\\\n'

# --- what is shown ----------------------------------------------------------------------------------------------------


def harmless(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


def test_every_part_of_a_document_takes_out_what_steers() -> None:
    document = (
        Sentence(STEERING), Lines(STEERING, (STEERING,)), Verbatim(STEERING, (STEERING,)),
        Grid(STEERING, (STEERING,), ((STEERING,),)),
    )  # fmt: skip
    stream = io.StringIO()
    show(document, stream)
    for text in (stream.getvalue(), render(document)):
        assert harmless(text)
        assert "".join(text.split()).count("".join(SEEN.split())) == 8, "brackets and all else of it are shown"


def test_the_live_view_shows_no_foreign_text_as_it_is() -> None:
    stream = io.StringIO()
    with LiveView(stream) as view:
        view.stage("compute", STEERING)
        view.trial_started(1, {STEERING: STEERING}, "compute")
        failure = Failure(kind="user_error", phase="build", message=STEERING)
        view.trial_finished(trial(1, {}, failure=failure), None, None)
        view.probe("memory", STEERING)
        view.note(STEERING)
    assert harmless(stream.getvalue())
    assert stream.getvalue().count(SEEN) == 6


def test_a_report_shows_names_of_the_user_and_steers_nothing() -> None:
    checked = parity(
        worst_parameter=STEERING,
        worst_buffer=STEERING,
        reason=STEERING,
        notes=(STEERING,),
        missing_gradients=(STEERING,),
    )
    sample = recommendation()
    hostile = sample.model_copy(
        update={
            "best": sample.best.model_copy(update={"parity": checked, "reasons": (STEERING,), "prices": (STEERING,)}),
            "rejected": (STEERING,), "warnings": (STEERING,), "verdict": STEERING,
            "machine": sample.machine.model_copy(update={"cpu_name": STEERING, "notes": (STEERING,)}),
            "workload": sample.workload.model_copy(update={"loss_convention": STEERING}),
        }
    )  # fmt: skip
    stream = io.StringIO()
    show(recommendation_document(hostile, Path(f"study {STEERING}")), stream)
    for text in (stream.getvalue(), describe(hostile)):
        assert harmless(text)
        assert text.count(":smile:") >= 12


def test_json_holds_it_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = recommendation(verdict=STEERING)
    text = export_json(hostile)
    assert text.isascii() and harmless(text)
    assert json.loads(text)["verdict"] == STEERING


# --- what is exported -------------------------------------------------------------------------------------------------


def calls(source: str) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}


def hostile_result(**changes: Any) -> Any:
    """A result in which every free text that an exported script could hold tries to become code."""
    plain = whole_recommendation()
    config = plain.best.config.replace(
        {"activation_checkpointing": "all", "compile_mode": "default", "compile_scope": "blocks"}
    )
    return plain.model_copy(
        update={
            "best": plain.best.model_copy(update={"config": config}),
            "workload": plain.workload.model_copy(
                update={"blocks": (f"block{INJECTION}", INJECTION), "model_class": INJECTION, "optimizer_class": INJECTION,
                        "loss_convention": INJECTION, "process_settings": {INJECTION: INJECTION}}
            ),
            "machine": plain.machine.model_copy(update={"cpu_name": INJECTION}),
            "autotune_version": INJECTION,
            "verdict": INJECTION,
            **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    "reference",
    [
        {"form": "value", "location": INJECTION},
        {"form": "file", "location": f"/tmp/{INJECTION}/train.py"},
        {"form": "file", "location": f"/tmp/{INJECTION}.py"},
    ],
)
def test_no_text_of_a_result_becomes_code(reference: dict[str, str]) -> None:
    harmless_result = whole_recommendation()
    hostile = hostile_result(reference=harmless_result.reference.model_copy(update=reference))
    script = export_python(hostile)
    assert "touch owned" in script, "the names are there, as text"
    assert not any("system" in call or "__import__" in call for call in calls(script))


@pytest.mark.parametrize("name", ["f; import os", "os.system('x')", "f\nimport os", "f) #"])
@pytest.mark.parametrize("form", ["file", "module"])
def test_what_is_no_name_is_no_function(form: str, name: str) -> None:
    names = {"model_fn": f"train:{name}" if form == "module" else name, "data_fn": "data_fn"}
    reference = whole_recommendation().reference.model_copy(update={"form": form, "names": names})
    with pytest.raises(UserError, match="is no name of a function"):
        export_python(hostile_result(reference=reference))
    with pytest.raises(UserError, match="is no name of a function"):
        export_python(hostile_result(reference=reference.model_copy(update={"names": {name: "data_fn"}})))


# --- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("knobs = " + "[" * 50_000, "is not valid TOML"),
        ("knobs" + ".a" * 2_000 + " = 1", "there is no knob|must be"),
        ('[knobs]\nprecision = "!!python/object/apply:os.system"', 'must be "all" or a list of values'),
        ("[knobs]\nprecision = [{name = 'os.system'}]", "precision has no value"),
        ("[knobs]\nbatch_size = [nan, inf]", "batch_size takes a whole number, not 'nan'"),
        ("[knobs]\nbatch_size = [1000000000000]", "batch_size must be at most"),
        ("[knobs]\n\"__import__('os')\" = 'all'", "there is no knob"),
        ("summary = 1979-05-27\n[knobs]\nprecision = [[[]]]", "precision has no value"),
        ("\x80\x04\x95", "is not valid TOML"),
    ],
)
def test_a_preset_is_data_and_what_is_wrong_in_it_is_told(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(text, encoding="latin-1")
    with pytest.raises(SpaceError, match=message):
        refuse_unknown(preset=str(tmp_path / "space.toml"), only=(), fixed={})


# --- pickles ----------------------------------------------------------------------------------------------------------


def test_pickles_touch_no_disk_and_no_one_else_may_look(tmp_path: Path) -> None:
    """Functions that travel by value go through a pair of connected sockets, which have no name and no file."""
    secret = "a-secret-that-the-functions-close-over"
    workload = workload_from_functions({"model_fn": lambda: secret, "data_fn": lambda: secret})
    assert workload.payload is not None and secret.encode() in workload.payload
    directory = tmp_path / "processes"
    directory.mkdir()
    entry = "tests.test_safety:answer_with_sockets"
    with TrialPool(workload, directory, entry=entry) as pool:
        answer = pool.run(
            TrialRequest(
                kind="facts", config=TrainingConfig({}), conditions=Conditions(device="cpu", global_batch_size=None)
            )
        )
        assert answer.failure is not None
        assert "seen: [] " in answer.failure.message, answer.failure.message
        written = [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
    assert not any(secret.encode() in content or content.startswith(b"\x80") for content in written)


def answer_with_sockets(request: TrialRequest, functions: Any, phase: Any) -> Any:
    """In the trial's process: which named sockets, pipes or files of ours it has open. None must be reachable by name."""
    targets = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")[:-1]]
    named = [name for name in targets if name.startswith("/") and not name.startswith(("/dev/", "/proc/"))]
    foreign = [name for name in named if not name.endswith((".log", ".unfinished"))]
    raise RuntimeError(f"seen: {foreign}")

"""What a person does with a result: save, load, build, print."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autotune.config import TrainingConfig, Value
from autotune.knobs.precision import Precision
from autotune.records import Conditions, Recommendation, WorkloadReference
from autotune.result import TuningResult, load
from tests.report import sample_records

CONFIG = TrainingConfig(
    {
        "batch_size": 2,
        "num_workers": 0,
        "prefetch_factor": 2,
        "pin_memory": False,
        "precision": "bf16",
        "memory_format": "as_is",
        "cudnn_benchmark": "as_is",
        "optimizer_impl": "fused",
        "activation_checkpointing": "as_is",
        "compile_scope": "model",
        "compile_mode": "as_is",
    }
)
AS_FOUND = CONFIG.replace({"batch_size": 4, "precision": "as_is", "optimizer_impl": "as_is"})


def model_fn() -> nn.Module:
    return nn.Linear(3, 1)


def data_fn() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=4)


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).square().mean()
    return loss


def test_the_answer_is_what_a_notebook_shows_and_print_tells_all() -> None:
    result = TuningResult(recommendation())
    assert repr(result) == f"<TuningResult: {result.recommendation.verdict}>"
    assert str(result).startswith(result.recommendation.verdict[:40])
    assert "Trains the same" in str(result)


def recommendation(device: str = "cpu") -> Recommendation:
    sample = sample_records.recommendation()
    conditions = Conditions.model_validate({"device": device, "global_batch_size": 4})
    names = {role: role for role in ("model_fn", "data_fn", "loss_fn")}
    return sample.model_copy(
        update={
            "settings": sample.settings.model_copy(update={"conditions": conditions}),
            "reference": WorkloadReference(form="file", location="train.py", names=names, source_hash="0" * 12),
            "baseline": sample.baseline.model_copy(update={"config": AS_FOUND}),
            "best": sample.best.model_copy(update={"config": CONFIG}),
        }
    )


def test_it_shows_what_was_found() -> None:
    result = TuningResult(recommendation())
    assert dict(result.config) == dict(CONFIG)
    assert (result.baseline, result.best) == (result.recommendation.baseline, result.recommendation.best)
    assert result.speedup.interval[0] < result.speedup.value < result.speedup.interval[1]
    assert (result.free_batch, result.keep) == (None, False)
    assert result.recommendation.verdict in str(result)


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    path.write_text("an older file")
    TuningResult(recommendation()).save(path)
    assert load(path) == TuningResult(recommendation())
    assert os.listdir(tmp_path) == ["best.json"]


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "best.json").mkdir()
    with pytest.raises(OSError, match="best.json"):
        TuningResult(recommendation()).save(tmp_path / "best.json")
    assert os.listdir(tmp_path) == ["best.json"]


def test_build_gives_the_training_that_was_measured() -> None:
    training = TuningResult(recommendation()).build(model_fn, data_fn, loss_fn=loss_fn)
    windows = list(training.loader)
    assert [[micro_batch.samples for micro_batch in window] for window in windows] == [[2, 2]] * 3
    before = training.model.weight.detach().clone()
    assert torch.isfinite(training.step(windows[0]))
    assert not torch.equal(before, training.model.weight)
    assert training.optimizer.defaults["fused"] is True


def test_build_takes_another_configuration() -> None:
    training = TuningResult(recommendation()).build(model_fn, data_fn, loss_fn=loss_fn, config=AS_FOUND)
    assert [len(window) for window in training.loader] == [1, 1, 1]
    assert not training.optimizer.defaults["fused"]


def test_build_asks_for_every_function_that_the_search_had() -> None:
    with pytest.raises(ValueError, match=r"the search ran with loss_fn; .* build\(\.\.\., loss_fn=loss_fn\)"):
        TuningResult(recommendation()).build(model_fn, data_fn)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_build_says_that_the_gpu_is_missing() -> None:
    with pytest.raises(ValueError, match="measured on a GPU .* finds none here"):
        TuningResult(recommendation("cuda")).build(model_fn, data_fn, loss_fn=loss_fn)


def test_build_tells_the_line_to_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """No knob of today needs a variable, so one is given the need; everything else is as it is."""

    def environment(self: Precision, value: Value) -> dict[str, str]:
        return {"AUTOTUNE_TEST_SETTING": str(value)}

    monkeypatch.setattr(Precision, "environment", environment)
    monkeypatch.delenv("AUTOTUNE_TEST_SETTING", raising=False)
    result = TuningResult(recommendation())
    with pytest.raises(ValueError, match="(?s)before torch is imported.*export AUTOTUNE_TEST_SETTING=bf16"):
        result.build(model_fn, data_fn, loss_fn=loss_fn)
    monkeypatch.setenv("AUTOTUNE_TEST_SETTING", "bf16")
    assert result.build(model_fn, data_fn, loss_fn=loss_fn).model is not None


def content(**changes: object) -> str:
    return json.dumps({**json.loads(recommendation().model_dump_json()), **changes})


def content_with(**changes: object) -> str:
    """A result whose best answer differs in these fields; those of its configuration are given as `config`."""
    best = json.loads(recommendation().best.model_dump_json())
    best["config"].update(changes.pop("config", {}))  # type: ignore[call-overload]
    return content(best={**best, **changes})


PICKLE = pickle.dumps(os.getcwd)


def content_with_precision(value: str | None) -> str:
    """A result whose best configuration has this precision; None: none at all."""
    best = json.loads(recommendation().best.model_dump_json())
    del best["config"]["precision"]
    if value is not None:
        best["config"]["precision"] = value
    return content(best=best)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read .*best.json: No such file"),
        ("{not json", "best.json is not JSON"),
        ("\xff\xfe", "best.json is not"),
        ("[1, 2]", "is not a recommendation; give the best.json of a study"),
        ('{"number": 1, "config": {}}', "is not a recommendation"),
        (content(schema_version=99), "has schema version 99, and this autotune reads version 1; use autotune 0.1.0"),
        (content(surprise=1), "is not a whole recommendation: surprise"),
        (content(baseline={}), r"is not a whole recommendation: baseline\.config"),
        ("[" * 100_000, "best.json is not JSON"),
        (content_with_precision("tf64"), "is not a whole recommendation: precision has no value 'tf64'"),
        (content_with_precision(None), "is not a whole recommendation: a configuration has no precision"),
        (content_with(config={"num_workers": -5}), "num_workers must be at least 0, not -5"),
        (content_with(config={"num_workers": 10**6}), "num_workers must be at most 1,024, not 1,000,000"),
        (content_with(config={"num_workers": "2; import os"}), "num_workers takes a whole number, not '2; import os'"),
        (
            content_with(config={"batch_size": 10**12}),
            "batch_size must be at most 2,147,483,647, not 1,000,000,000,000",
        ),
        (content_with(config={"batch_size": True}), "batch_size takes a whole number, not 'true'"),
        (content_with(config={"evil": 1}), "there is no knob 'evil'"),
        (content_with(config={"precision": {"!!python/object": "os.system"}}), "is not a whole recommendation: best"),
        (content_with(interval=(float("nan"), 1.0)), "is not JSON: Out of range float values"),
        (
            content_with(samples_per_second=0.0).replace('"interval": [2', '"interval": [1e999, 2'),
            "is not JSON: Out of r",
        ),
        (content_with(interval=(5000.0, 4000.0)), "samples_per_second is 2345.6 with the interval 5000 to 4000"),
        (content_with(speedup={"value": -2.0, "interval": [-3, 3]}), "speedup is -2 with the interval -3 to 3"),
        (content_with(micro_batch_size=-1), "a batch, a number of rounds or a number of bytes is negative"),
        (content_with(parity=repr(PICKLE)), "is not a whole recommendation: best.parity"),
        (PICKLE.decode("latin-1"), "is not JSON"),
        ("9" * 10_000, "is not JSON: Exceeds the limit"),
        (content(settings={"conditions": {"device": "cuda:0; rm"}}), "is not a whole recommendation: settings"),
        (content(schema_version="x" * 5000), "has schema version x{20}, and"),
    ],
)
def test_load_says_in_one_sentence_what_is_wrong(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as raised:
        load(path)
    assert "\n" not in str(raised.value)


def test_an_impossible_batch_to_hold_is_refused(tmp_path: Path) -> None:
    settings = json.loads(recommendation().settings.model_dump_json())
    settings["conditions"]["global_batch_size"] = -4
    (tmp_path / "best.json").write_text(content(settings=settings))
    with pytest.raises(ValueError, match="global_batch_size must be above 0, not -4"):
        load(tmp_path / "best.json")


def test_what_is_no_file_or_far_too_large_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no file; give the best.json"):
        load(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**35)
    with pytest.raises(ValueError, match="it is larger than 32 MiB"):
        load(tmp_path / "large")

import warnings

import pytest

from autotune.knobs.base import CodeLines
from autotune.knobs.pin_memory import PinMemory
from tests.knobs.programs import baseline_config, train
from tests.knobs.search_facts import cpu_facts, cuda_facts

KNOB = PinMemory()


def test_only_a_gpu_gives_a_choice() -> None:
    assert KNOB.choices(cuda_facts()) == (False, True)
    assert KNOB.choices(cpu_facts()) == (False,)
    assert KNOB.conflict(True, {}, cpu_facts()) == "page-locked memory only helps copies to a GPU"


def test_the_users_own_setting_is_the_baseline_anywhere() -> None:
    assert KNOB.baseline(cpu_facts(pin_memory=True)) is True
    assert KNOB.choices(cpu_facts(pin_memory=True)) == (True,)
    assert KNOB.conflict(True, {}, cpu_facts(pin_memory=True)) is None


def test_a_loader_that_cannot_be_rebuilt_keeps_its_setting() -> None:
    facts = cuda_facts(batch_fixed_reason="a subclass of DataLoader", workers_fixed_reason="a subclass of DataLoader")
    assert KNOB.choices(facts) == (False,)
    assert KNOB.conflict(True, {}, facts) == "the loader cannot be rebuilt: a subclass of DataLoader"


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False)])
def test_parse_takes_true_and_false(text: str, value: bool) -> None:
    assert KNOB.parse(text) is value


def test_parse_lists_what_it_knows() -> None:
    with pytest.raises(ValueError, match="pin_memory has no value 'yes'; known are true, false"):
        KNOB.parse("yes")


def test_export_copies_without_waiting() -> None:
    expected = CodeLines(loader_arguments={"pin_memory": "True"}, non_blocking=True)
    assert KNOB.export(True, baseline_config(), cuda_facts()) == expected


def test_applied_the_loader_pins_and_copies_do_not_wait() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is no accelerator to pin for
        training = train(pin_memory=True)
    assert training.loader.loader.pin_memory is True
    assert training.parts.non_blocking is True
    assert train(pin_memory=False).parts.non_blocking is False

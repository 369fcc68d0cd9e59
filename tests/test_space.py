"""A search space is what a preset leaves of what the knobs offer, and says why a point or a name is refused."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.config import TrainingConfig, Value
from autotune.knobs.registry import KNOBS, knob
from autotune.space import SearchSpace, SpaceError, build_space, preset_names, preset_objective
from tests.report.sample_records import search_facts, workload

FACTS = search_facts(largest_batch_size=128)
SHIPPED = ("loader", "quick", "memory", "default", "thorough")


def space(preset: str = "default", **arguments: Any) -> SearchSpace:
    return build_space(arguments.pop("facts", FACTS), preset=preset, **arguments)


def preset_file(folder: Path, text: str) -> str:
    file = folder / "mine.toml"
    file.write_text(text)
    return str(file)


# --- presets ----------------------------------------------------------------------------------------------------------


def test_the_presets_are_found_with_their_summaries() -> None:
    assert tuple(preset_names()) == SHIPPED
    assert all(preset_names().values())


def test_the_presets_of_a_wheel_lie_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "autotune" / "_search_spaces"
    inside.mkdir(parents=True)
    (inside / "tiny.toml").write_text('summary = "one knob"\n[knobs]\nprecision = "all"\n')
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path / package)
    assert preset_names() == {"tiny": "one knob"}
    assert space("tiny").varied == ("precision",)


@pytest.mark.parametrize("preset", SHIPPED)
def test_every_preset_holds_every_knob_and_the_baseline(preset: str) -> None:
    built = space(preset)
    assert list(built.choices) == [knob.name for knob in KNOBS]
    assert set(built.baseline) == set(built.choices)
    assert all(built.baseline[name] in values for name, values in built.choices.items())
    assert built.baseline == built.start
    assert built.conflict(built.baseline) is None
    assert built.rank(built.baseline) == 0


def test_the_presets_grow() -> None:
    quick, default, thorough = (space(preset) for preset in ("quick", "default", "thorough"))
    assert quick.size < default.size < thorough.size
    assert quick.varied == ("batch_size", "num_workers", "precision", "optimizer_impl")
    assert not any("max-autotune" in str(value) for value in default.choices["compile_mode"])
    assert "max-autotune" in thorough.choices["compile_mode"]
    assert thorough.choices == {knob.name: knob.choices(FACTS) for knob in KNOBS}


def test_a_preset_may_name_what_is_made_better() -> None:
    aims = {preset: preset_objective(preset) for preset in SHIPPED}
    assert aims == {**dict.fromkeys(SHIPPED, "throughput"), "memory": "memory"}


def test_the_loader_preset_moves_nothing_of_the_step() -> None:
    assert all(knob(name).stage == "loader" for name in space("loader").varied)


def test_a_file_narrows_what_the_knobs_offer(tmp_path: Path) -> None:
    built = space(
        preset_file(
            tmp_path,
            '[knobs]\nprecision = ["fp16", "bf16"]\npin_memory = [true]\nactivation_checkpointing = ["all"]\n',
        )
    )
    assert built.choices["precision"] == ("as_is", "bf16", "fp16")
    assert built.choices["pin_memory"] == (False, True)
    assert built.choices["activation_checkpointing"] == ("as_is", "all")
    assert built.varied == ("pin_memory", "precision", "activation_checkpointing")


def test_numbers_off_the_grid_are_as_good_where_nothing_speaks_against_them(tmp_path: Path) -> None:
    text = "[knobs]\nbatch_size = [16, 100, 5, 1000]\nnum_workers = [5]\n"
    built = space(preset_file(tmp_path, text))
    assert built.choices["batch_size"] == (16, 32, 100)  # 5 is no divisor of 32, and 1000 above the largest
    assert built.choices["num_workers"] == (2, 5)


def test_a_value_that_this_machine_lacks_is_left_out(tmp_path: Path) -> None:
    file = preset_file(tmp_path, '[knobs]\nactivation_checkpointing = ["all"]\nprecision = ["tf32", "bf16"]\n')
    without_blocks = space(file, facts=search_facts(workload=workload(blocks=())))
    assert without_blocks.choices["activation_checkpointing"] == ("as_is",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[knobs]\nprecison = "all"\n', r"mine\.toml: there is no knob 'precison'; known are batch_size, .*precision"),
        ('[knobs]\nprecision = ["fp8"]\n', r"mine\.toml: precision has no value 'fp8'; known are as_is, tf32, bf16"),
        ('[knobs]\nbatch_size = ["many"]\n', r"mine\.toml: batch_size takes a whole number, not 'many'"),
        ('[knobs]\nprecision = "bf16"\n', r"mine\.toml: precision must be \"all\" or a list of values, not 'bf16'"),
        ("[knobs]\nprecision = []\n", r"precision must be \"all\" or a list of values, not \[\]"),
        (
            'title = "x"\n[knobs]\nprecision = "all"\n',
            r"mine\.toml has an unknown entry 'title'; known are summary, objective and",
        ),
        (
            'objective = "speed"\n[knobs]\nprecision = "all"\n',
            r"mine\.toml: objective must be throughput or memory, not 'speed'",
        ),
        ('summary = "x"\n', r"mine\.toml needs a table \[knobs\]"),
        ("[knobs\n", r"mine\.toml is not valid TOML: .*line 1"),
    ],
)
def test_mistakes_in_a_file_name_the_file_and_what_is_known(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        space(preset_file(tmp_path, text))


def test_unknown_presets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SpaceError, match=r"there is no search space 'fast'; known are default, loader, memory, quick, thorough"
    ):
        space("fast")
    with pytest.raises(SpaceError, match=r"cannot read the search space .*none\.toml: No such file or directory"):
        space(str(tmp_path / "none.toml"))


# --- only and fixed ---------------------------------------------------------------------------------------------------


def test_only_leaves_the_others_at_the_baseline() -> None:
    built = space(only=("precision", "compile_mode"))
    assert built.varied == ("precision", "compile_mode")
    assert built.choices["compile_scope"] == ("model",)
    assert built.choices["compile_mode"] == space().choices["compile_mode"]


def test_only_may_name_what_the_preset_leaves_out() -> None:
    assert space("quick", only=("activation_checkpointing",)).varied == ("activation_checkpointing",)


def test_unknown_names_are_listed() -> None:
    with pytest.raises(SpaceError, match=r"there is no knob 'workers'; known are batch_size, num_workers"):
        space(only=("workers",))
    with pytest.raises(SpaceError, match=r"there is no knob 'workers'"):
        space(fixed={"workers": 2})


@pytest.mark.parametrize("value", [16, "16"])
def test_a_fixed_value_is_the_only_choice(value: Value) -> None:
    built = space(fixed={"batch_size": value, "pin_memory": "true"})
    assert built.choices["batch_size"] == built.batch_sizes == (16,)
    assert built.choices["pin_memory"] == (True,)
    assert built.baseline["batch_size"] == 32
    assert built.start == built.baseline.replace({"batch_size": 16, "pin_memory": True})


def test_a_fixed_value_need_not_be_on_the_grid() -> None:
    free = search_facts(largest_batch_size=128, global_batch_size=None)
    assert 100 not in space(facts=free).batch_sizes
    assert space(facts=free, fixed={"batch_size": 100}).batch_sizes == (100,)


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"batch_size": 5}, "what is fixed cannot be used: batch_size: micro-batches of 5 do not add up to the global"),
        (
            {"batch_size": 48},
            "batch_size=48 does not make up the 32 samples of an optimizer step, which are kept: fix a",
        ),
        ({"batch_size": "big"}, "batch_size takes a whole number, not 'big'"),
        ({"precision": "fp8"}, "precision has no value 'fp8'; known are"),
        ({"compile_scope": "step", "compile_mode": "as_is"}, "compile_scope: nothing is compiled"),
    ],
)
def test_fixed_values_that_cannot_be_used_are_told(fixed: Mapping[str, Value], message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        space(fixed=fixed)


def test_a_fixed_value_may_ask_for_another_one() -> None:
    built = space(fixed={"compile_scope": "step"})
    assert built.conflict(built.start) is None
    changed = {name for name, value in built.start.items() if value != built.baseline[name]}
    assert changed == {"compile_scope", "compile_mode"}


# --- what it says of a point ------------------------------------------------------------------------------------------


def test_a_conflict_names_its_knob() -> None:
    built = space()
    reason = built.conflict(built.baseline.replace({"compile_scope": "step"}))
    assert reason == "compile_scope: nothing is compiled, so there is no step to compile"


def test_configurations_share_a_memory_class_unless_a_class_knob_differs() -> None:
    built = space()
    same = built.baseline.replace({"batch_size": 64, "num_workers": 0, "optimizer_impl": "fused"})
    other = built.baseline.replace({"precision": "bf16"})
    assert built.memory_class(same) == built.memory_class(built.baseline) != built.memory_class(other)


def test_only_how_batches_are_loaded_leaves_the_numerics() -> None:
    built = space()
    same = built.baseline.replace({"num_workers": 0, "pin_memory": True})
    assert built.numerics_key(same) == built.numerics_key(built.baseline)
    for name in ("batch_size", "precision", "optimizer_impl", "activation_checkpointing", "compile_mode"):
        value = next(value for value in built.choices[name] if value != built.baseline[name])
        assert built.numerics_key(built.baseline.replace({name: value})) != built.numerics_key(built.baseline)


@pytest.mark.parametrize(("size", "count", "effective"), [(32, 1, 32), (8, 4, 32), (1, 32, 32), (128, 1, 128)])
def test_the_effective_batch_is_held_below_the_global_batch(size: int, count: int, effective: int) -> None:
    built = space()
    config = built.baseline.replace({built.batch_name: size})
    counted = built.micro_batch(config), built.micro_batches(config), built.effective_batch(config)
    assert counted == (size, count, effective)


def test_the_fingerprint_follows_choices_and_baseline_alone() -> None:
    first = space()
    assert first.fingerprint == space().fingerprint
    assert len(first.fingerprint) == 12
    others = [
        space("quick"),
        space("thorough"),
        space(only=("precision",)),
        space(fixed={"batch_size": 32}),
        space(facts=search_facts(workload=workload(num_workers=3), largest_batch_size=128)),
    ]
    prints = [first.fingerprint, *(other.fingerprint for other in others)]
    assert len(set(prints)) == len(prints)


def test_the_size_counts_all_points() -> None:
    built = space("quick", only=("precision", "optimizer_impl"))
    points = {
        TrainingConfig({**built.baseline, "precision": precision, "optimizer_impl": implementation})
        for precision, implementation in itertools.product(built.choices["precision"], built.choices["optimizer_impl"])
    }
    assert built.size == len(points)


def test_building_a_space_imports_no_torch() -> None:
    import subprocess

    script = "import sys, autotune.space; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

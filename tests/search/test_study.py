"""A study keeps what ran, whatever happens to the search, and proposes neither that nor what was rejected."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autotune.config import TrainingConfig
from autotune.errors import NoAnswerError
from autotune.records import Conditions, Failure, FailureKind, LoaderProbe, Probe, Trial, TrialAnswer, WorkloadReference
from autotune.search.study import Study, other_searches, stored_records, workload_identity
from autotune.search.tables import INSTEAD, StudyError
from autotune.space import SearchSpace, build_space
from tests.report.sample_records import measurement, parity, search_facts, workload

MACHINE = "0123456789ab"
FACTS = search_facts(largest_batch_size=128)
CONDITIONS = Conditions(device="cuda", global_batch_size=32)


def quick_space(**arguments: Any) -> SearchSpace:
    return build_space(FACTS, preset="quick", **arguments)


def opened(directory: Path, **changes: Any) -> Study:
    arguments: dict[str, Any] = {
        "workload": "aaaabbbbcccc", "space": quick_space(), "conditions": CONDITIONS, "objective": "throughput",
        "machine_identity": MACHINE, "seed": 0,
    }  # fmt: skip
    return Study.open(directory, **{**arguments, **changes})


def recorded(study: Study, trial: Trial) -> Trial:
    """A trial as if it had just run, with the number that it got in the study."""
    numbered = trial.model_copy(update={"number": study.begin(trial.config)})
    study.finish(numbered)
    return numbered


@pytest.fixture(scope="module")
def empty_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, since Optuna takes half a second for a new file."""
    made = tmp_path_factory.mktemp("empty")
    opened(made).close()
    return made


@pytest.fixture
def directory(empty_study: Path, tmp_path: Path) -> Path:
    """Of a study in which nothing ran yet."""
    shutil.copy(empty_study / "study.db", tmp_path)
    return tmp_path


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests with many trials, of which none is about power cuts."""
    connect = sqlite3.connect

    def without_sync(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    monkeypatch.setattr(sqlite3, "connect", without_sync)


def trial(
    config: TrainingConfig, number: int = 0, *, rate: float | None = None, kind: FailureKind | None = None
) -> Trial:
    return Trial(
        number=number,
        stage="explore",
        config=config,
        measurement=None if rate is None else measurement(samples_per_second=rate),
        failure=None if kind is None else Failure(kind=kind, phase="measure", message="it failed"),
        started_at=1.8e9,
        seconds=2.0,
        machine_identity=MACHINE,
    )


def probe(config: TrainingConfig) -> Probe:
    seen = LoaderProbe(num_workers=2, micro_batch_size=32, samples_per_second=10.0, blocks=measurement().blocks)
    return Probe(
        kind="loader", config=config, answer=TrialAnswer(loader=seen), started_at=1.8e9, machine_identity=MACHINE
    )


def as_optuna_sees_it(study: Study, directory: Path) -> optuna.Study:
    return optuna.load_study(study_name=study.name, storage=f"sqlite:///{directory / 'study.db'}")


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_every_trial_is_told_to_optuna_with_its_full_record(directory: Path) -> None:
    base = quick_space().baseline
    outcomes: list[tuple[TrainingConfig, float | None, FailureKind | None, TrialState, dict[str, float]]] = [
        (base, 100.0, None, TrialState.COMPLETE, {}),
        (base.replace({"batch_size": 128}), None, "device_oom", TrialState.PRUNED, {"memory": 1.0}),
        (base.replace({"batch_size": 37}), None, "host_oom", TrialState.PRUNED, {"memory": 1.0}),
        (base.replace({"precision": "fp16"}), 150.0, "numerics", TrialState.PRUNED, {"numerics": 1.0}),
        (base.replace({"num_workers": 0}), None, "crash", TrialState.FAIL, {}),
    ]
    with opened(directory) as study:
        kept = [recorded(study, trial(config, rate=rate, kind=kind)) for config, rate, kind, _, _ in outcomes]
        assert [one.number for one in kept] == [0, 1, 2, 3, 4]
        assert study.trials() == kept
        seen = as_optuna_sees_it(study, directory)
    for frozen, (config, rate, _, state, constraints) in zip(seen.trials, outcomes, strict=True):
        assert frozen.params == dict(config)
        assert frozen.state == state
        assert frozen.constraints == constraints
        assert Trial.model_validate(frozen.user_attrs["record"]) == kept[frozen.number]
        if state == TrialState.COMPLETE:
            assert frozen.value == rate
    assert seen.best_trial.number == 0


def test_trials_and_probes_survive(directory: Path) -> None:
    base = quick_space().baseline
    with opened(directory) as study:
        first = recorded(study, trial(base, rate=100.0))
        study.add_probe(probe(base))
        study.add_probe(probe(base.replace({"num_workers": 0})))
    with opened(directory) as study:
        assert study.trials() == [first]
        assert study.probes() == [probe(base), probe(base.replace({"num_workers": 0}))]
        assert study.interrupted == []
        assert recorded(study, trial(base, rate=101.0)).number == 1


def test_a_repeat_is_a_trial_of_its_own(directory: Path) -> None:
    base = quick_space().baseline
    with opened(directory) as study:
        for number in range(3):
            repeat = trial(base, rate=100.0 + number).model_copy(update={"stage": "confirm", "round": number})
            recorded(study, repeat)
        assert [(one.round, one.stage) for one in study.trials()] == [(0, "confirm"), (1, "confirm"), (2, "confirm")]


def test_numbers_that_json_lacks_survive(directory: Path) -> None:
    config = quick_space().baseline
    odd = trial(config).model_copy(
        update={
            "measurement": measurement(losses=(math.nan, math.inf)),
            "parity": parity(relative_error=math.inf, passed=False),
            "failure": Failure(kind="numerics", phase="parity", message="not a number"),
        }
    )
    with opened(directory) as study:
        recorded(study, odd)
    with opened(directory) as study:
        (kept,) = study.trials()
    assert kept.measurement is not None and math.isnan(kept.measurement.losses[0])
    assert kept.parity is not None and kept.parity.relative_error == math.inf


def test_a_trial_that_turns_out_wrong_is_replaced(directory: Path) -> None:
    config = quick_space().baseline.replace({"precision": "fp16"})
    with opened(directory) as study:
        kept = recorded(study, trial(config, rate=500.0))
        wrong = kept.model_copy(update={"failure": Failure(kind="numerics", phase="parity", message="it differs")})
        study.replace(wrong)
        assert study.trials() == [wrong]
    with opened(directory) as study:
        assert study.trials() == [wrong]
        assert as_optuna_sees_it(study, directory).trials[0].value == 500.0
    assert stored_records(directory)[0] == [wrong]


def test_the_memory_objective_is_minus_the_peak(directory: Path) -> None:
    with opened(directory, objective="memory") as study:
        recorded(study, trial(quick_space().baseline, rate=100.0))
        assert as_optuna_sees_it(study, directory).trials[0].value == -measurement().memory.peak_allocated_bytes


def test_records_can_be_shown_without_opening_the_study(directory: Path) -> None:
    base = quick_space().baseline
    with opened(directory) as study:
        kept = recorded(study, trial(base, rate=100.0))
        study.add_probe(probe(base))
        assert stored_records(directory) == ([kept], [probe(base)])
    with opened(directory, space=quick_space(only=("precision",))) as study:
        assert stored_records(directory) == ([], [])
    with pytest.raises(StudyError, match=r"there is no study in .*elsewhere"):
        stored_records(directory / "elsewhere")
    assert not (directory / "elsewhere").exists()
    (directory / "outer" / "demo").mkdir(parents=True)
    (directory / "study.db").rename(directory / "outer" / "demo" / "study.db")
    with pytest.raises(StudyError, match=r"there is no study in .*outer; there is one in .*outer/demo; give"):
        stored_records(directory / "outer")


def test_the_identity_of_a_workload_follows_its_source_and_what_was_seen_of_it() -> None:
    reference = WorkloadReference(form="file", location="/a/train.py", names={}, source_hash="aaaabbbbcccc")
    moved = reference.model_copy(update={"location": "/b/train.py"})
    edited = reference.model_copy(update={"source_hash": "ddddeeeeffff"})
    identity = workload_identity(reference, workload())
    assert identity == workload_identity(moved, workload())
    assert identity != workload_identity(edited, workload())
    assert identity != workload_identity(reference, workload(fingerprint="112233445566"))


def test_a_trial_of_another_version_is_refused_with_the_field(directory: Path) -> None:
    with opened(directory) as study:
        number = recorded(study, trial(quick_space().baseline, rate=100.0)).number
        study._tables.replace_record(study.name, number, {"number": number, "colour": "red"})
    with pytest.raises(StudyError, match=r"holds a study of another version of autotune \(it differs in \w+\)"):
        opened(directory)


# --- resume -----------------------------------------------------------------------------------------------------------

KILLED_SEARCH = """
import os, signal, sys
from pathlib import Path
from tests.search.test_study import opened, quick_space, recorded, trial
import autotune.search.study as module

study = opened(Path(sys.argv[1]))
base = quick_space().baseline
recorded(study, trial(base, rate=100.0))
where = sys.argv[2]
if where == "added":
    module.optuna.Trial = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
number = study.begin(base.replace({"num_workers": 0}))
if where == "recorded":
    study._tell = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    study.finish(trial(base.replace({"num_workers": 0}), number, kind="device_oom"))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("where", ["added", "running", "recorded"])
def test_a_killed_search_goes_on_where_it_was(directory: Path, where: str) -> None:
    command = [sys.executable, "-c", KILLED_SEARCH, str(directory), where]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL, done.stderr
    running = quick_space().baseline.replace({"num_workers": 0})
    with opened(directory) as study:
        if where == "recorded":
            assert study.interrupted == []
            assert [one.config for one in study.trials()] == [study.trials()[0].config, running]
            assert as_optuna_sees_it(study, directory).trials[1].state == TrialState.PRUNED
        else:
            assert study.interrupted == [running]
            assert len(study.trials()) == 1
            assert as_optuna_sees_it(study, directory).trials[1].state == TrialState.FAIL
            assert recorded(study, trial(running, rate=90.0)).number == 2
    with opened(directory) as study:
        assert study.interrupted == []


def test_what_others_or_an_earlier_version_left_half_noted_is_ended_and_not_run(directory: Path) -> None:
    """That version noted what begins in a dozen transactions: as waiting, as running, then one knob after the other."""
    config = quick_space().baseline.replace({"num_workers": 0})
    with opened(directory) as study:
        file = as_optuna_sees_it(study, directory)
        file.ask({"lr": optuna.distributions.FloatDistribution(0.0, 1.0)})
        for knobs in (["batch_size", "precision"], [], None):
            file.enqueue_trial(dict(config), user_attrs={"config_key": config.key})
            asked = file.ask() if knobs is not None else None
            for name in knobs or []:
                assert asked is not None
                asked.suggest_categorical(name, (config[name],))
    with opened(directory) as study:
        assert study.interrupted == []
        assert [one.state for one in as_optuna_sees_it(study, directory).trials] == [TrialState.FAIL] * 4


def test_a_trial_that_somebody_else_adds_meanwhile_is_not_taken_for_ours(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quick_space().baseline
    with opened(directory) as study:
        file = as_optuna_sees_it(study, directory)
        create = optuna.storages.RDBStorage._create_new_trial

        def and_another(self: optuna.storages.RDBStorage, *arguments: Any, **options: Any) -> Any:
            made = create(self, *arguments, **options)
            create(self, file._study_id)
            return made

        with monkeypatch.context() as patched:
            patched.setattr(optuna.storages.RDBStorage, "_create_new_trial", and_another)
            number = study.begin(config)
        study.finish(trial(config, number, rate=100.0))
        assert [(one.number, one.config) for one in study.trials()] == [(0, config)]
        assert file.trials[0].values == [100.0]


# --- directories that cannot be used ----------------------------------------------------------------------------------


def test_another_workload_is_refused_until_fresh(directory: Path) -> None:
    with opened(directory) as study:
        recorded(study, trial(quick_space().baseline, rate=100.0))
    with pytest.raises(StudyError, match=r"holds a study of another workload .*; choose another --study"):
        opened(directory, workload="ddddeeeeffff")
    with opened(directory, workload="ddddeeeeffff", fresh=True) as study:
        assert study.trials() == []
    assert sqlite3.connect(directory / "study.db.old").execute("SELECT count(*) FROM trials").fetchone() == (1,)


def test_another_machine_is_refused_in_whatever_space(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(StudyError, match="holds a study made on another machine"):
        opened(tmp_path, machine_identity="ffffffffffff", space=quick_space(only=("precision",)))


def test_another_space_or_other_conditions_are_another_study_in_the_same_file(directory: Path) -> None:
    with opened(directory) as study:
        recorded(study, trial(quick_space().baseline, rate=100.0))
        study.add_probe(probe(quick_space().baseline))
    other_conditions = {"memory_limit_bytes": 2**30, "global_batch_size": None}
    changes: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"space": quick_space(fixed={"precision": "bf16"})}, ("other values of precision",)),
        ({"space": build_space(FACTS, preset="loader")}, ("other values of 5 knobs",)),
        (
            {"conditions": CONDITIONS.model_copy(update=other_conditions)},
            ("global_batch_size: 32 then, none now", "memory_limit: none then, 1.0 GiB now"),
        ),
        ({"objective": "memory"}, ("objective: throughput then, memory now",)),
    ]
    for change, told in changes:
        with opened(directory, **change) as study:
            assert (study.trials(), study.probes()) == ([], [])
            (other,) = study.others
            assert (other.trial_count, other.differences) == (1, told)
        assert other_searches(directory) == (other,)
    with opened(directory, seed=5) as study:
        assert len(study.trials()) == 1
        assert study.others == ()


def test_what_an_earlier_version_did_not_keep_is_not_told(directory: Path) -> None:
    with opened(directory) as study:
        recorded(study, trial(quick_space().baseline, rate=100.0))
    with sqlite3.connect(directory / "study.db") as connection:
        assert connection.execute("DELETE FROM autotune_state WHERE key = 'asked'").rowcount > 0
    connection.close()
    with opened(directory, objective="memory") as study:
        (other,) = study.others
        assert (other.trial_count, other.differences) == (1, ())


def test_the_last_of_other_searches_is_the_one_that_ran_last(directory: Path) -> None:
    for objective in ("throughput", "memory", "throughput"):
        with opened(directory, objective=objective) as study:
            recorded(study, trial(quick_space().baseline, rate=100.0))
    with opened(directory, space=quick_space(only=("precision",))) as study:
        assert [other.trial_count for other in study.others] == [1, 2]
        assert study.others[0].last_started_at <= study.others[1].last_started_at


def test_a_directory_may_have_any_name(tmp_path: Path) -> None:
    with opened(tmp_path / "my study?100% {done} #1 ümlaut") as study:
        kept = recorded(study, trial(quick_space().baseline, rate=100.0))
    assert stored_records(tmp_path / "my study?100% {done} #1 ümlaut") == ([kept], [])


def test_two_searches_do_not_share_a_directory(tmp_path: Path) -> None:
    with (
        opened(tmp_path),
        pytest.raises(
            StudyError, match=rf"another search \(process {os.getpid()}\) is using .*; wait for it, or choose"
        ),
    ):
        opened(tmp_path)
    opened(tmp_path).close()


def test_a_failed_open_leaves_the_directory_free(directory: Path) -> None:
    opened(directory).close()
    for _ in range(2):
        with pytest.raises(StudyError, match="another workload"):
            opened(directory, workload="ddddeeeeffff")
    opened(directory).close()


def _is_a_file(path: Path) -> Path:
    path.write_text("x")
    return path


def _lies_below_a_file(path: Path) -> Path:
    path.write_text("x")
    return path / "study"


@pytest.mark.parametrize("make", [_is_a_file, _lies_below_a_file])
def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(StudyError, match="cannot keep a study in .*; choose another directory with --study"):
        opened(make(tmp_path / "taken"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StudyError, match="cannot keep a study in .*: Permission denied"):
        opened(tmp_path)


def test_a_broken_file_is_told_and_set_aside_by_fresh(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"not a database at all, and long enough to be looked at" * 40)
    with pytest.raises(StudyError, match=r"study\.db cannot be used as a study \(file is not a database\)"):
        opened(tmp_path)
    opened(tmp_path, fresh=True).close()
    assert (tmp_path / "study.db.old").exists()


def test_a_torn_file_is_told(directory: Path) -> None:
    with opened(directory) as study:
        recorded(study, trial(quick_space().baseline, rate=100.0))
    content = (directory / "study.db").read_bytes()
    (directory / "study.db").write_bytes(content[: len(content) // 2])
    with pytest.raises(StudyError, match=r"study\.db cannot be used as a study"):
        opened(directory)


def _is_a_database_of_recipes(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")


def _is_a_study_of_the_users_own(path: Path) -> None:
    optuna.create_study(study_name="learning rate", storage=f"sqlite:///{path}")


def _is_random(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(50_000))


def _is_made_by_a_later_optuna(path: Path) -> None:
    opened(path.parent).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE version_info SET schema_version = 99")
        connection.execute("UPDATE alembic_version SET version_num = 'v99.0.0'")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_is_a_database_of_recipes, r"cannot be used as a study \(it is a database of something else\)"),
        (_is_a_study_of_the_users_own, r"holds a study of another program \(learning rate\)"),
        (_is_random, r"cannot be used as a study \(file is not a database\)"),
        (
            _is_made_by_a_later_optuna,
            r"cannot be used as a study \(The runtime optuna version .* is no longer compatible",
        ),
    ],
)
def test_files_of_others_are_refused_and_left_as_they_are(
    tmp_path: Path, make: Callable[[Path], None], told: str
) -> None:
    path = tmp_path / "study.db"
    make(path)
    before = path.read_bytes()
    for use in (opened, stored_records) if make is not _is_made_by_a_later_optuna else (opened,):
        with pytest.raises(StudyError) as error:
            use(tmp_path)
        assert len(str(error.value).splitlines()) == 1
        if use is opened:
            assert re.search(rf"{told}.*; {re.escape(INSTEAD)}$", str(error.value))
        assert path.read_bytes() == before
    opened(tmp_path, fresh=True).close()
    assert (tmp_path / "study.db.old").read_bytes() == before


def test_a_directory_in_the_place_of_the_file_is_told_and_set_aside_by_fresh(tmp_path: Path) -> None:
    (tmp_path / "study.db").mkdir()
    (tmp_path / "study.db" / "kept").touch()
    with pytest.raises(StudyError, match=r"cannot be used as a study \(unable to open database file\)"):
        opened(tmp_path)
    opened(tmp_path, fresh=True).close()
    assert (tmp_path / "study.db.old" / "kept").exists()


def test_an_empty_file_is_a_study_that_begins(tmp_path: Path) -> None:
    (tmp_path / "study.db").touch()
    with pytest.raises(StudyError, match="holds nothing yet"):
        stored_records(tmp_path)
    with opened(tmp_path) as study:
        assert study.trials() == []


def test_a_study_that_can_only_be_read_can_be_shown(directory: Path) -> None:
    with opened(directory) as study:
        kept = recorded(study, trial(quick_space().baseline, rate=100.0))
    if os.geteuid() != 0:  # root may write everywhere
        (directory / "study.db").chmod(0o400)
        with pytest.raises(StudyError, match="readonly database"):
            opened(directory)
    assert stored_records(directory) == ([kept], [])


def test_fresh_takes_along_what_a_killed_search_was_writing(directory: Path) -> None:
    with opened(directory) as study:
        recorded(study, trial(quick_space().baseline, rate=100.0))
    command = (
        "import os, sqlite3, sys; connection = sqlite3.connect(sys.argv[1]); connection.execute('PRAGMA cache_size = 1');"
        "connection.execute('PRAGMA cache_spill = 1'); connection.execute('BEGIN IMMEDIATE');"
        "connection.execute('DELETE FROM trial_user_attributes'); connection.execute('DELETE FROM trial_params');"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", command, str(directory / "study.db")], check=False)
    assert (directory / "study.db-journal").exists()
    opened(directory, fresh=True).close()
    old = sqlite3.connect(directory / "study.db.old")
    assert old.execute("PRAGMA quick_check").fetchone() == ("ok",)
    assert old.execute("SELECT count(*) FROM trial_user_attributes").fetchone() > (0,)


# --- proposals --------------------------------------------------------------------------------------------------------


def explore(study: Study, count: int) -> None:
    """As a search does it, to whose sampler all points are worth the same."""
    for _ in range(count):
        recorded(study, trial(study.propose(), rate=100.0))


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_what_ran_and_what_is_rejected_is_known_and_not_proposed(directory: Path) -> None:
    space = quick_space(only=("precision",))
    ran, rejected, *left = (space.start.replace({"precision": value}) for value in space.choices["precision"])
    with opened(directory, space=space) as study:
        recorded(study, trial(ran, rate=100.0))
    with opened(directory, space=space) as study:
        study.reject(rejected, "it does not fit")
        assert study.knows(ran) and study.knows(rejected)
        for _ in left:
            config = study.propose()
            assert config in left and not study.knows(config)
            kept = recorded(study, trial(config, rate=100.0))
        study.replace(
            kept.model_copy(update={"failure": Failure(kind="numerics", phase="parity", message="it differs")})
        )
        assert all(study.knows(config) for config in (ran, rejected, *left))


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_what_is_rejected_leaves_nothing_on_disk(directory: Path) -> None:
    with opened(directory) as study:
        explore(study, 12)
        for _ in range(20):
            study.reject(study.propose(), "it does not fit")
        assert len(as_optuna_sees_it(study, directory).trials) == 12


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_baseline_outside_what_is_fixed_is_kept_beside_the_proposals(directory: Path) -> None:
    space = quick_space(fixed={"batch_size": 16, "precision": "bf16"})
    with opened(directory, space=space) as study:
        recorded(study, trial(space.baseline, rate=100.0))
        explore(study, 2)
        kept = [one.params["precision"] for one in as_optuna_sees_it(study, directory).trials]
    assert kept == ["as_is", "bf16", "bf16"]


# --- manners ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_optuna_says_nothing_and_keeps_its_own_settings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    level = optuna.logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(tmp_path) as study:
            explore(study, 12)
            study.reject(study.propose(), "a conflict")
        opened(tmp_path).close()
    assert optuna.logging.get_verbosity() == level
    assert capfd.readouterr() == ("", "")


def test_the_study_imports_no_torch() -> None:
    script = "import sys, autotune.search.study; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- a full disk ------------------------------------------------------------------------------------------------------


def limit_file(monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """From now on SQLite finds the disk full when the file would have more pages (4 KiB each) than this."""
    connect = sqlite3.connect

    def with_limit(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", with_limit)


@pytest.mark.parametrize("what", ["trials", "probes", "replaced"])
@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_full_disk_is_told_in_a_sentence_and_loses_nothing_that_was_stored(
    directory: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    base = quick_space().baseline
    stored = 1
    with opened(directory) as study:
        first = recorded(study, trial(base, rate=100.0))
    with monkeypatch.context() as limited:
        limit_file(limited, (directory / "study.db").stat().st_size // 4096 + 2)
        with pytest.raises(NoAnswerError) as told, opened(directory) as study:  # noqa: PT012  # any of the writes may fail
            while True:
                if what == "trials":
                    recorded(study, trial(base, rate=200.0))
                elif what == "probes":
                    study.add_probe(probe(base))
                else:
                    study.replace(first.model_copy(update={"failure": Failure(
                        kind="crash", phase="soak", message="x" * 5000 * stored
                    )}))  # fmt: skip
                stored += 1
    assert str(told.value) == (
        f"cannot write {directory / 'study.db'} (database or disk is full): make room there and give the same command "
        "again, it goes on where this one stopped"
    )
    with opened(directory) as study:
        assert len(study.trials() if what == "trials" else study.probes()) == (
            stored if what == "trials" else stored - 1 if what == "probes" else 0
        )
        assert recorded(study, trial(base, rate=300.0)).number >= len(study.trials()) - 1


def test_a_disk_that_is_full_before_the_study_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as limited:
        limit_file(limited, 10)
        with pytest.raises(NoAnswerError, match=r"study.db \(database or disk is full\): make room there"):
            opened(tmp_path)
    opened(tmp_path).close()

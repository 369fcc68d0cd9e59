"""The host's memory, read from the real kernel."""

import psutil

from autotune.processes import system_memory


def test_available_bytes():
    assert 0 < system_memory.available_bytes() <= psutil.virtual_memory().total


def test_oom_kills_do_not_fall():
    first = system_memory.oom_kills()
    assert 0 <= first <= system_memory.oom_kills()


def test_data_bytes_grow_with_what_is_allocated():
    before = system_memory.data_bytes()
    held = bytearray(64 * 2**20)
    assert 60 * 2**20 < system_memory.data_bytes() - before < 100 * 2**20
    del held


def test_limits_of_control_groups_count(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    (tmp_path / "memory.events").write_text("oom 9\noom_kill 7\n")
    monkeypatch.setattr(system_memory, "_cgroup_directory", lambda controller: tmp_path)
    assert system_memory.available_bytes() == 150_000
    before = system_memory.oom_kills()
    (tmp_path / "memory.events").write_text("oom 9\noom_kill 8\n")
    assert system_memory.oom_kills() == before + 1
    (tmp_path / "memory.max").write_text("max\n")
    assert system_memory.available_bytes() > 1_000_000

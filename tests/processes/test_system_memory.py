"""The host's memory, read from the real kernel."""

from autotune.processes import system_memory


def test_oom_kills_do_not_fall():
    first = system_memory.oom_kills()
    assert 0 <= first <= system_memory.oom_kills()


def test_data_bytes_grow_with_what_is_allocated():
    before = system_memory.data_bytes()
    held = bytearray(64 * 2**20)
    assert 60 * 2**20 < system_memory.data_bytes() - before < 100 * 2**20
    del held


def test_kills_in_the_control_group_count(tmp_path, monkeypatch):
    (tmp_path / "memory.events").write_text("oom 9\noom_kill 7\n")
    monkeypatch.setattr(system_memory, "_cgroup_directory", lambda controller: tmp_path)
    before = system_memory.oom_kills()
    (tmp_path / "memory.events").write_text("oom 9\noom_kill 8\n")
    assert system_memory.oom_kills() == before + 1

"""The hostfile, and the choice in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from distcore import ConfigError
from distcore.launchers import Host
from distcore_clusters.hosts import choose, hosts_of, read_hostfile

HOSTS = (Host(name="host0", slots=4), Host(name="host1", slots=2))


def test_a_hostfile_has_a_machine_per_line(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two\nhost0 slots=4\n\nhost1   slots=2  # small\n")
    assert read_hostfile(str(file), None) == HOSTS
    file.write_text("host0\n")
    assert read_hostfile(str(file), 3) == (Host(name="host0", slots=3),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "host0 slots=two\n",
            r"line 1: host0 has 'slots=two'; expected: host0 slots=N, the number of ranks$",
        ),
        ("host0 slots=0\n", r"line 1: host0 has 'slots=0'"),
        ("\nhost0\n", r"line 2: host0 has no slots, and there is no --nproc; expected"),
        ("host0 slots=1\nhost0 slots=2\n", r"line 2: host0 is listed twice$"),
        ("# nothing\n", r": names no machine; expected lines such as: host0 slots=4$"),
    ],
)
def test_a_bad_hostfile_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hostfile(str(file), None)


def test_a_missing_hostfile_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^--hostfile /nowhere: No such file or directory$"):
        read_hostfile("/nowhere", None)


def test_include_chooses_machines_and_slots_in_its_order() -> None:
    assert choose(HOSTS, include="host1@host0:2,0") == (
        HOSTS[1],
        Host(name="host0", slots=2, chosen=(2, 0)),
    )


def test_exclude_leaves_the_others() -> None:
    assert choose(HOSTS, exclude="host0:1,2@host1") == (Host(name="host0", slots=2, chosen=(0, 3)),)


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        (
            "host2",
            "",
            (
                r"^--include host2: no machine 'host2' \(did you mean 'host[01]'\?\) \(machines:"
                r" host0, host1\)$"
            ),
        ),
        ("host1:2", "", r"^--include host1:2: host1 has 2 slot\(s\), 0 to 1, and no slot 2$"),
        ("host1:a", "", r"^--include host1:a: 'a': expected numbers of slots, as in host1:0,2$"),
        ("host1:1,1", "", r"a slot of host1 is listed twice$"),
        ("host1@host1", "", r"host1 is listed twice$"),
        ("", "host0@host1", r"^--exclude host0@host1: leaves no machine$"),
        ("host0", "host1", r"^--include and --exclude: give one of them$"),
    ],
)
def test_a_choice_that_cannot_be_is_one_line(include: str, exclude: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(HOSTS, include, exclude)


def test_without_a_hostfile_slots_of_this_machine_are_chosen_by_launchers_that_start_ranks_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distcore.distributed.devices.count_accelerators", lambda: 0)
    here = (Host(name="localhost", slots=2, chosen=(2, 0)),)
    for launcher in ("local", "torchrun:host0:29500"):
        assert hosts_of({"launcher": launcher, "include": "localhost:2,0"}, nproc=4) == here
    assert hosts_of({"launcher": "slurm", "include": "host0"}, nproc=4) is None

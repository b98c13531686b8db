"""The help of `train`: what most jobs set on two screens, everything under `--help all`."""

from __future__ import annotations

import re

import pytest

from distcore.cli.flags import COMMON, FLAGS
from distcore.cli.launcher_flags import FLAGS as LAUNCHER_FLAGS
from distcore.cli.main import main

SCREEN = 24
"""Lines of a terminal as it opens, in 80 columns."""


def help_of(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(words.split())
    return capsys.readouterr().out


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (--[\w-]+)", text, re.M))


@pytest.mark.needs("distcore-tasks")
def test_the_flags_that_most_jobs_set_are_on_two_screens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of("train --help", monkeypatch, capsys)
    assert len(text.splitlines()) <= 2 * SCREEN
    assert flags_in(text) >= COMMON
    assert {
        "--model",
        "--data",
        "--warmup",
        "--weight-decay",
        "--clip-norm",
        "--schedule",
    } <= flags_in(text)
    assert "--hostfile" not in text
    assert "train --help all explains" in text


@pytest.mark.needs("distcore-tasks")
def test_help_all_has_all_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of("train --task=causal-lm --help all", monkeypatch, capsys)
    assert {flag.name for flag in FLAGS} | set(LAUNCHER_FLAGS) | {"--split-documents"} <= flags_in(
        text
    )
    short = help_of("train --task=causal-lm --help", monkeypatch, capsys)
    (more,) = re.findall(r"explains these in full, and (\d+) more", short)
    assert int(more) == len(flags_in(text) - flags_in(short))


@pytest.mark.needs("distcore-workbench")
def test_a_command_of_its_own_has_its_own_flags_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of("plan --help", monkeypatch, capsys)
    assert {"--strategies", "--device-memory", "--html"} <= flags_in(text)
    assert "--keep-last" not in text
    assert (
        len(text.splitlines())
        < len(help_of("plan --help all", monkeypatch, capsys).splitlines()) / 2
    )

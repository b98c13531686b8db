"""Variables that go to other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from distcore.errors import ConfigError
from distcore.launchers.planning import forwarded, settings


def test_variables_that_make_sense_elsewhere_are_forwarded_and_no_others() -> None:
    stays = {
        "HOME": "/root",
        "HF_TOKEN": "secret",
        "AWS_KEY": "secret",
        "RANK": "1",
        "TORCHELASTIC_RUN_ID": "x",
    }
    goes = {"DISTCORE_CACHE": "/c", "HF_HOME": "/hf", "NCCL_DEBUG": "INFO", "PYTHONPATH": "/p"}
    assert forwarded({**stays, **goes}) == goes


def test_env_goes_before_the_file_of_the_folder_which_goes_before_that_of_home(
    tmp_path: Path,
) -> None:
    for name in ("here", "home"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".distcore.env").write_text(f"# set\nexport WHERE={name}\nTWO=a=b\n")
    assert settings(["TWO=2"], (tmp_path / "here", tmp_path / "home")) == {
        "WHERE": "here",
        "TWO": "2",
    }
    (tmp_path / "here/.distcore.env").write_text("A=1\nB\n")
    with pytest.raises(
        ConfigError, match=r"here/\.distcore\.env, line 2: 'B': expected NAME=VALUE$"
    ):
        settings([], (tmp_path / "here",))

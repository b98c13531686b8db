"""Ranks that ``horovodrun`` has started, told by their environment."""

from __future__ import annotations

import pytest

from distcore import ConfigError, RankInfo
from distcore_horovod.rank_environment import horovodrun

STARTED = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
}


def test_a_rank_of_horovodrun_has_its_place() -> None:
    assert horovodrun(STARTED) == RankInfo(
        rank=3, size=4, local_rank=1, local_size=2, launcher="horovodrun"
    )


@pytest.mark.parametrize(
    "environ", [{}, {"HOROVOD_RANK": "0"}, STARTED | {"RANK": "0", "WORLD_SIZE": "2"}]
)
def test_ranks_of_others_are_left_to_them(environ: dict[str, str]) -> None:
    assert horovodrun(environ) is None


def test_a_broken_environment_is_one_line() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^HOROVOD_SIZE='many' in the environment: expected a whole number; start",
    ):
        horovodrun(STARTED | {"HOROVOD_SIZE": "many"})

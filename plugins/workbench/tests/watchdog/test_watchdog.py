"""The watchdog says where a rank is stuck, from real ranks that are."""

from __future__ import annotations

import logging
import pickle
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distcore import DistcoreError, RankInfo, RunConfig, hookimpl, train
from distcore.testing.problem import Problem
from distcore_workbench.watchdog.watch import Signs, Watch
from distcore_workbench.watchdog.watchdog import Watchdog, _Counting

pytestmark = pytest.mark.programs  # its runs are whole ones


class SleepsInStep:
    @hookimpl(wrapper=True)
    def step(self):
        time.sleep(0.8)
        return (yield)


class SleepsInForward(Problem):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(0.8)
        return super().loss(model, batch)


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Problem, limit: float, **extra: object
) -> None:
    extensions = {"watchdog": Watchdog(limit=limit), **extra}
    monkeypatch.setattr("distcore.engine.trainer.load_extensions", lambda _config: extensions)
    train(
        RunConfig(
            out=str(tmp_path / "run"), max_steps=1, global_batch_size=4, device="cpu", lr=0.01
        ),
        task,
    )


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Alarms of the training itself; on a busy machine starting may take longer
    than these limits, too.
    """
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    return [alarm for alarm in said if " step()" in alarm or " train_step()" in alarm]


def test_a_slow_hook_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, monkeypatch, Problem(), 0.3, slow=SleepsInStep())
    assert alarms(caplog) == ["watchdog: rank 0 has been in hook step() for 0.3 s, in step 1"]


def test_a_slow_pass_is_named_with_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, monkeypatch, SleepsInForward(), 0.3)
    (alarm,) = alarms(caplog)
    prefix = "watchdog: rank 0 has been in train_step() for 0.3 s, in step 1 on rows "
    assert alarm.startswith(prefix)
    assert (
        len(torch.tensor([int(row) for row in alarm.removeprefix(prefix).split(", ")]).unique())
        == 4
    )


def test_zero_switches_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, monkeypatch, Problem(), 0, slow=SleepsInStep())
    assert alarms(caplog) == []


def test_auto_learns_the_limit_from_the_longest_stay() -> None:
    signs = Signs(step=4, start=4)
    watch = Watch("auto", signs, RankInfo(), Path("hangs"), thread=threading.get_ident())
    now = time.monotonic()
    for step, seconds, limit in (
        (4, 0, 120),
        (5, 50, 120),
        (6, 60, 120),
        (7, 69, 100),
        (8, 70, 100),
        (9, 90, 200),
    ):
        signs.step = step
        watch._note(now + seconds)
        assert watch._limit_now() == limit
    fast = Watch("auto", Signs(step=3), RankInfo(), Path("hangs"), thread=0)
    assert fast._limit_now() == 60


@pytest.mark.parametrize(
    ("limit", "says"),
    [(-1, r"extensions.watchdog.limit = -1\S*: must be 0"), ("soon", r"limit = 'soon': .*'auto'")],
)
def test_a_limit_that_is_none_is_refused(limit: object, says: str) -> None:
    assert Watchdog().limit == 120
    with pytest.raises(DistcoreError, match=says):
        train(
            RunConfig.model_validate({"lr": 0.1, "extensions": {"watchdog": {"limit": limit}}}),
            Problem(),
        )


def test_a_sampler_that_is_counted_comes_back_alone_from_a_pickle() -> None:
    signs = Signs()
    sampler = _Counting(range, signs)  # type: ignore[arg-type]
    assert list(sampler(2, 5)) == [2, 3, 4]  # type: ignore[comparison-overlap]
    assert signs.batches == 1
    assert pickle.loads(pickle.dumps(sampler)) is range


def test_the_watchdog_names_machine_address_and_likely_cause() -> None:
    far = RankInfo(rank=1, size=2, launcher="slurm", master_addr="127.0.0.1", master_port=29500)
    line = Watch(120, Signs(), far, Path("hangs"), thread=0)._alone(sys._getframe())
    assert (
        f"rank 1 on {socket.gethostname()} (127.0.0.1; rank 0 at 127.0.0.1:29500) has been in "
        in line
    )
    assert "another rank, its machine or the link to it does not answer" in line

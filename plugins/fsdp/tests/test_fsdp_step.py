"""In a step all ranks agree on the loss scale, and gradients are sent once."""

import os
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distcore import Clip, ModelSource, RankInfo, Run, RunConfig, defaults, launch
from distcore.testing.problem import Problem
from distcore.testing.rank import lab_of
from distcore.testing.subject import Subject
from distcore_fsdp.strategy import FSDPStrategy

pytestmark = pytest.mark.ranks

CONFIG = RunConfig(device="cpu", lr=0.1)


def a_run(strategy, accumulation=1, build=None):
    """A run of a small model over all ranks; the strategy has joined them."""
    torch.manual_seed(0)
    rank_info = RankInfo(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    world = strategy.setup(CONFIG, rank_info)
    source = ModelSource(build=build or small, meta_model=build or small)
    built = strategy.build_model(CONFIG, world, source)
    model = built.model
    run = Run(
        config=CONFIG, world=world, capabilities=strategy.capabilities, module=model, model=model,
        accumulation=accumulation, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
    )  # fmt: skip
    wrapped = strategy.wrap_model(
        run, model, lambda module: torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    )
    return replace(
        run, model=wrapped.model, optimizer=wrapped.optimizer, strategy_state=wrapped.state
    )


def small():
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))


def overflow_on_last_rank():
    run = a_run(FSDPStrategy())
    before = [p.full_tensor().clone() for p in run.model.parameters()]
    x = torch.ones(2, 4)
    factor = float("inf") if run.world.rank == run.world.size - 1 else 1.0
    scales, moved = [], []
    for scale in (factor, 1.0):
        defaults.backward(run, run.model(x).sum() * scale)
        defaults.step(run, Clip(norm=1.0))
        scales.append(run.scaler.get_scale())
        after = [p.full_tensor() for p in run.model.parameters()]
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    defaults.teardown(run.world)
    return scales, moved


def inf_in_one_shard():
    """The last rank's shard of the gradient overflows, after gradients were averaged."""
    run = a_run(FSDPStrategy())
    before = [p.full_tensor().clone() for p in run.model.parameters()]
    defaults.backward(run, run.model(torch.ones(2, 4)).sum())
    if run.world.rank == run.world.size - 1:
        next(run.model.parameters()).grad.to_local().fill_(float("inf"))
    defaults.step(run, Clip(norm=None))
    after = [p.full_tensor() for p in run.model.parameters()]
    unmoved = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    scale = run.scaler.get_scale()
    defaults.teardown(run.world)
    return unmoved, scale


def collectives(sharding, micro_batches):
    """How often each collective ran in one step of ``micro_batches``."""
    run = a_run(strategy := FSDPStrategy(sharding=sharding), accumulation=micro_batches)
    with Collectives() as counted:
        for index in range(micro_batches):
            with strategy.accumulate(run, last=index == micro_batches - 1):
                run.model(torch.ones(2, 4)).sum().backward()
    defaults.teardown(run.world)
    return counted.names


class Siamese(nn.Module):
    """Calls its blocks twice, beside or behind each other; or for nothing a third time."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def embed(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        first = self.embed(x)
        second = self.embed(first if self.way == "behind" else 2 * x)
        if self.way == "unused":
            self.embed(3 * x)
        return first + second


def sent_for(way):
    """Collectives of a step of three micro-batches, and elements of the gradient that are no
    plain sum over ranks.
    """

    def siamese():
        torch.manual_seed(0)
        return Siamese(way)

    run = a_run(strategy := FSDPStrategy(wrap="blocks.*"), accumulation=3, build=siamese)
    torch.manual_seed(run.world.rank)
    plain, micro_batches = siamese(), torch.randn(3, 2, 4)
    with Collectives() as counted:
        for index, micro_batch in enumerate(micro_batches):
            with strategy.accumulate(run, last=index == 2):
                strategy.backward(replace(run, scaler=None), run.model(micro_batch).square().sum())
    other = 0
    for micro_batch in micro_batches:
        plain(micro_batch).square().sum().backward()
    for mine, parameter in zip(run.model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        other += int((mine.grad.full_tensor() != parameter.grad).sum())
    return counted.names["_reduce_scatter_base_"], other


def sent_for_all(ways):
    sent = {way: sent_for(way) for way in ways}
    dist.destroy_process_group()
    return sent


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names[func._opname] += 1
        return func(*args, **(kwargs or {}))


def fp16_apart(folder):
    """The largest relative differences of losses and of gradient norms to one process in
    fp16, and both scales.
    """
    subject = Subject(config=RunConfig(strategy="fsdp", nproc=2, device="cpu"), cases=())
    with lab_of(subject, folder) as lab:
        mine, alone = (
            lab.job(Problem(), precision="fp16"),
            lab.build_alone(Problem(), precision="fp16"),
        )
        # where neither overflows: a rank's share of the loss is scaled by the ranks
        for job in (mine, alone):
            assert job.run.scaler is not None
            job.run.scaler.load_state_dict(job.run.scaler.state_dict() | {"scale": 1024.0})
        trained, expected = mine.train(10), alone.train(10)
    scales = {job.run.scaler.get_scale() for job in (mine, alone) if job.run.scaler is not None}
    return (
        largest(trained.losses, expected.losses),
        largest(trained.norms, expected.norms),
        len(scales) == 1,
    )


def largest(values, expected):
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


def test_fp16_trains_as_one_process_does(tmp_path):
    for losses, norms, same_scale in launch(fp16_apart, tmp_path, nproc=2):
        assert losses < 1e-3
        assert norms < 1e-2
        assert same_scale


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert launch(overflow_on_last_rank, nproc=2) == [([512.0, 512.0], [False, True])] * 2


def test_an_overflow_in_one_shard_skips_the_step_on_all():
    assert launch(inf_in_one_shard, nproc=2) == [(True, 512.0)] * 2


@pytest.mark.parametrize(("sharding", "gathers"), [("full", 4 * 3 * 2), ("grad", 3)])
def test_gradients_travel_once_a_step_and_kept_parameters_too(sharding, gathers):
    for counts in launch(collectives, sharding, 4, nproc=2):
        assert counts == {"_allgather_base_": gathers, "_reduce_scatter_base_": 3}


def test_gradients_of_blocks_that_are_called_twice_travel_once_too():
    for sent in launch(sent_for_all, ["beside", "behind", "unused"], nproc=2):
        assert sent == dict.fromkeys(sent, (3, 0))

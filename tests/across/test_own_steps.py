"""Steps that a task makes itself: each example against its algorithm in plain PyTorch,
and what is refused.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcore import ConfigError, RunConfig, TaskError, load_config, train
from distcore.checkpoint import read_tensors
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.task.bound import BoundTask
from distcore.resolve import strategies
from distcore.resolve.check_capabilities import check_task
from distcore.testing.problem import Problem
from distcore.testing.reference import largest_difference, state_of
from distcore.testing.variants import Phased, WholeBatch

FOLDER = Path(__file__).parents[2] / "examples/own-steps"
STEPS = 6
CONFIG: dict[str, Any] = {
    "lr": 1e-2,
    "max_steps": STEPS,
    "global_batch_size": 16,
    "micro_batch_size": 4,
    "device": "cpu",
    "log_every": 1,
    "optimizer": {"eps": 1e-2, "weight_decay": 0.1},
    "extensions": {"progress": False},
    "checkpoints": {"best": None},
    "schedule": {"name": "constant"},
    "clip": {"norm": None},
    "log_level": "error",
}
Batch = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def example() -> Iterator[Callable[[str], Any]]:
    """Return the task of an example by its file's name."""
    sys.path.insert(0, str(FOLDER))

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"own_steps_{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        (task,) = [
            value
            for value in vars(module).values()
            if "train_step" in getattr(value, "__dict__", {})
        ]
        return task()

    yield load
    sys.path.remove(str(FOLDER))
    sys.modules.pop("digits", None)


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def gradient_of(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def moved(model: nn.Module, moves: list[Tensor]) -> nn.Module:
    """Return another model with moved weights."""
    other = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    with torch.no_grad():
        for new, old, move in zip(other.parameters(), model.parameters(), moves, strict=True):
            new.copy_(old + move)
    return other


def sam(model: nn.Module, batch: Batch) -> list[Tensor]:
    here = gradient_of(mean(model, batch), model)
    up = moved(model, [0.05 * each / (flat(here).norm() + 1e-12) for each in here])
    return gradient_of(mean(up, batch), up)


def gradient_norm(model: nn.Module, batch: Batch) -> list[Tensor]:
    here = gradient_of(mean(model, batch), model)
    return [0.3 * a + 0.7 * b for a, b in zip(here, sam(model, batch), strict=True)]


def pcgrad(model: nn.Module, batch: Batch) -> list[Tensor]:
    logits = model(batch[0])
    probabilities = logits.softmax(1)[:, 1::2].sum(1)
    odd = F.binary_cross_entropy(probabilities, (batch[1] % 2).float())
    one, other = flat(gradient_of(mean(model, batch), model)), flat(gradient_of(odd, model))
    product = torch.dot(one, other)
    if product < 0:
        one, other = one - product / other.dot(other) * other, other - product / one.dot(one) * one
    sizes = [p.numel() for p in model.parameters()]
    return [
        g.view_as(p) for g, p in zip((one + other).split(sizes), model.parameters(), strict=True)
    ]


def fomaml(model: nn.Module, batch: Batch) -> list[Tensor]:
    supports = batch[2]

    def of(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[0][rows]), batch[1][rows], reduction="sum") / (
            len(rows) / 2
        )

    adapted = moved(model, [torch.zeros_like(p) for p in model.parameters()])
    inner = torch.optim.SGD(adapted.parameters(), lr=0.1)
    for _ in range(2):
        inner.zero_grad()
        of(adapted, supports).backward()
        inner.step()
    return gradient_of(of(adapted, ~supports), adapted)


def agc(model: nn.Module, batch: Batch) -> list[Tensor]:
    clipped = []
    for gradient, weights in zip(
        gradient_of(mean(model, batch), model), model.parameters(), strict=True
    ):
        if weights.dim() > 1:
            for row, unit in zip(gradient, weights.detach(), strict=True):
                most = 0.01 * max(float(unit.norm()), 1e-3)
                if float(row.norm()) > most:
                    row *= most / row.norm()
        clipped.append(gradient)
    return clipped


def usual(model: nn.Module, batch: Batch) -> list[Tensor]:
    return gradient_of(mean(model, batch), model)


ALGORITHMS = {
    "sam": sam,
    "gradient_norm": gradient_norm,
    "pcgrad": pcgrad,
    "fomaml": fomaml,
    "agc": agc,
    "lookahead": usual,
}


def plain(name: str, task: Any) -> dict[str, Tensor]:
    """Train in plain PyTorch on whole global batches; return the tensors of a checkpoint."""
    config = load_config(None, CONFIG)
    data = task.prepare(config)
    torch.manual_seed(config.seed)
    model = task.build_model(config, data)
    biases = [p for key, p in model.named_parameters() if key.endswith("bias")]
    weights = [p for key, p in model.named_parameters() if not key.endswith("bias")]
    groups: list[Any] = [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-2, foreach=False)
    slow = {key: p.detach().clone() for key, p in model.named_parameters()}
    plan = training_plan(config, data.train)
    for step in range(STEPS):
        batch = data.train.batch(plan.rows(0, step))
        for parameter, gradient in zip(
            model.parameters(), ALGORITHMS[name](model, batch), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
        if name == "lookahead" and step == 4:
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    slow[key] = slow[key] + 0.5 * (parameter - slow[key])
                    parameter.copy_(slow[key])
    state = state_of(model, optimizer)
    return state | (
        {f"optimizer/{key}/slow": value for key, value in slow.items()}
        if name == "lookahead"
        else {}
    )


def run(out: Path, task: Any, **changes: Any) -> dict[str, Tensor]:
    train(RunConfig(**CONFIG | {"out": str(out)} | changes), task)
    return dict(read_tensors(max((out / "checkpoints").iterdir())))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_example_is_its_algorithm_in_plain_pytorch(
    name: str, example: Any, tmp_path: Path
) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 60
    task = example(name)
    expected = plain(name, task)
    assert largest_difference(run(tmp_path / "run", task), expected)[0] <= 1e-5
    if name != "lookahead":  # without its own kind of step the task would end elsewhere
        assert largest_difference(plain("lookahead", task), expected)[0] > 1e-4


@pytest.mark.needs("distcore-ddp", "distcore-fsdp", "distcore-mesh", "distcore-accelerate")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {}),
        ("fsdp", {}),
        ("fsdp", {"sharding": "grad"}),
        ("mesh", {"shard": 2}),
        ("accelerate", {}),
    ],
)
def test_examples_end_alike_over_two_ranks(
    strategy: str, options: dict[str, Any], example: Any, tmp_path: Path
) -> None:
    for name in ALGORITHMS if strategy in ("ddp", "fsdp") and not options else ("sam", "lookahead"):
        ended = run(
            tmp_path / name, example(name), strategy=strategy, strategy_options=options, nproc=2
        )
        assert largest_difference(ended, plain(name, example(name)))[0] <= 1e-5, name


@pytest.mark.programs
@pytest.mark.parametrize("name", ["sam", "lookahead"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    name: str, example: Any, tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole", example(name))
    run(tmp_path / "cut", example(name), save_every=3)
    on = run(tmp_path / "on", example(name), resume=str(tmp_path / "cut/checkpoints/step-00000003"))
    assert whole.keys() == on.keys()
    assert all(torch.equal(value, on[key]) for key, value in whole.items())


def lacking(strategy: str, precision: str = "fp32", **options: Any) -> None:
    config = load_config(
        None, {"strategy": strategy, "strategy_options": options, "precision": precision}
    )
    task: Any = type("Own", (Problem,), {"train_step": lambda self, step: step.gradients()})()
    check_task(config, strategies.load_strategy(config).capabilities, BoundTask.wrap(task))


@pytest.mark.needs("distcore-ddp", "distcore-deepspeed", "distcore-mesh", "distcore-horovod")
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("deepspeed", {"stage": 2}),
        ("horovod", {}),
        ("mesh", {"tp": 2}),
        ("mesh", {"pp": 2}),
        ("ddp", {"static_graph": True}),
    ],
)
def test_a_strategy_without_gradients_between_backward_and_step_is_refused(
    strategy: str, options: dict[str, Any]
) -> None:
    with pytest.raises(
        ConfigError, match=rf"makes its own steps, and strategy '{strategy}' .*; .*ddp.* could"
    ):
        lacking(strategy, **options)


def test_fp16_is_refused() -> None:
    lacking("single", "bf16")
    with pytest.raises(
        ConfigError, match=r"makes its own steps, whose gradients fp16 scales; use bf16 or fp32"
    ):
        lacking("single", "fp16")


@pytest.mark.parametrize(
    ("train_step", "line"),
    [
        (lambda self, step: step.gradients(), r"train_step\(\) did not call step.apply\(\)"),
        (
            lambda self, step: step.gradients() and step.apply(),
            r"train_step\(\) returned NoneType; expected the loss",
        ),
    ],
)
def test_a_step_without_update_or_loss_is_refused(
    train_step: Any, line: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=line):
        run(tmp_path / "run", type("Own", (Problem,), {"train_step": train_step})())


@pytest.mark.parametrize("other", [Phased, WholeBatch])
def test_own_steps_beside_another_kind_of_step_are_refused(
    other: type[Any], tmp_path: Path
) -> None:
    with pytest.raises(
        TaskError, match=r"task Both: has both train_step\(\) and (phases|batch_loss)\(\)"
    ):
        run(tmp_path / "run", type("Both", (other,), {"train_step": lambda self, step: None})())

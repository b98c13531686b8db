"""Modules of one's own: each dtype and each state travels, is saved and comes back; what cannot
is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from distcore import (
    Capabilities,
    DistcoreError,
    ModelError,
    RunConfig,
    Simple,
    TaskError,
    hookimpl,
    train,
)
from distcore.checkpoint import Checkpoint, read_tensors
from distcore.checkpoint.distance import difference
from distcore.checkpoint.surroundings import warn_of_changed_sources
from distcore.distributed.agreement import share_buffers, share_extra_state
from distcore.engine import trainer
from distcore.engine.mixed_devices import explain_mixed_devices
from distcore.engine.module_checks import check_module
from distcore.errors import StrategyError
from distcore.jobs.export import fill
from distcore.model.hooks_on_gradients import hooked_parameters, refuse_lost_hooks
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.extra_state import extra_state, load_extra_state
from distcore.plugin.strategy.hooks import Hooks
from distcore.strategies.single import SingleStrategy

CONFIG: dict[str, Any] = {
    "lr": 1e-2,
    "max_steps": 2,
    "global_batch_size": 8,
    "micro_batch_size": 4,
    "device": "cpu",
    "nproc": 1,
    "extensions": {"progress": False, "metrics": False},
    "checkpoints": {"best": None, "keep_last": 9},
}
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
PLAIN = Capabilities(spec_version=3)


class Own(Simple):
    """A user's task around a net."""

    def __init__(self, net: type[nn.Module]) -> None:
        super().__init__()
        self._net = net

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return TensorDataset(X), TensorDataset(X[:4])

    def model(self) -> nn.Module:
        return self._net()

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).square()[:, 0]


def config(out: Path, **changes: Any) -> RunConfig:
    return RunConfig(**CONFIG | {"out": str(out)} | changes)


def saved(out: Path) -> dict[str, Tensor]:
    return dict(read_tensors(sorted((out / "checkpoints").iterdir())[-1], ("model",)))


STATES = {
    "large": torch.tensor([2**60 + 12345, 3**37]),
    "unsigned": torch.tensor([2**64 - 1, 1], dtype=torch.uint64),
    "complex": torch.polar(torch.ones(3), torch.arange(3) * 0.7),
    "conjugated": torch.polar(torch.ones(3), torch.arange(3) * 0.7).conj(),
    "eighth": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
    "sixteen": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "wide": torch.tensor([1 / 3], dtype=torch.float64),
    "flag": torch.tensor(True),
    "none": torch.empty(0, 3),
}


class AllStates(nn.Module):
    """A layer with a buffer of each dtype, and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 3)
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0))
        for name, value in STATES.items():
            self.register_buffer(name, value.clone())

    def forward(self, x: Tensor) -> Any:
        return (self.line(x) * self.turn * self.complex).abs().sum(1, keepdim=True)


def the_same(one: Tensor, other: Tensor) -> bool:
    def raw(tensor: Tensor) -> Tensor:
        return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)

    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        raw(one), raw(other)
    )


class Ranks:
    """Stands for the hooks of two ranks: what the main rank gathered, the other one is told."""

    told: dict[str, dict[str, Tensor]]

    def __init__(self) -> None:
        self.told = {}

    def gather_outputs(self, run: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if run.world.is_main:
            self.told[",".join(outputs)] = outputs
        return self.told[",".join(outputs)]


def test_the_distance_of_complex_tensors_has_both_parts() -> None:
    one = torch.tensor([3 + 4j])
    assert difference(one, torch.tensor([3 + 3j])).largest == pytest.approx(1)
    assert difference(one.real, one).relative == pytest.approx(4 / 5)


def on_two_ranks(share: Any, main: nn.Module, other: nn.Module) -> None:
    ranks = Ranks()
    for number, module in enumerate((main, other)):
        world = SimpleNamespace(size=2, is_main=number == 0, device=torch.device("cpu"))
        share(SimpleNamespace(module=module, world=world, optimizer="one that trains"), ranks)


def test_buffers_of_the_main_rank_arrive_bit_for_bit() -> None:
    main, other = AllStates(), AllStates()
    for name, buffer in other.named_buffers():
        setattr(other, name, torch.zeros_like(buffer))
    on_two_ranks(share_buffers, main, other)
    assert all(the_same(other.get_buffer(name), value) for name, value in STATES.items())


def test_a_run_saves_and_loads_each_dtype_bit_for_bit(tmp_path: Path) -> None:
    train(config(tmp_path / "run", ema={"decay": 0.5}), Own(AllStates))
    state = saved(tmp_path / "run")
    assert all(
        the_same(state[f"model/{name}"], value.resolve_conj()) for name, value in STATES.items()
    )
    assert state["model/turn"].is_complex()
    assert bool((state["model/turn"] != 1).any())
    assert state["model/empty"].shape == (0,)
    more = {"max_steps": 3, "resume": "auto", "resume_changed": "max_steps", "ema": {"decay": 0.5}}
    train(config(tmp_path / "run", **more), Own(AllStates))
    again = saved(tmp_path / "run")
    assert all(
        the_same(again[f"model/{name}"], value.resolve_conj()) for name, value in STATES.items()
    )


class Counts(nn.Linear):
    """A layer that counts its passes in training, as extra state."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.calls, self.seen = 0, torch.zeros(2, dtype=torch.int64)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "more": [{"seen": self.seen}, None, "text"]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls, self.seen = state["calls"], state["more"][0]["seen"]

    def forward(self, input: Tensor) -> Tensor:
        self.calls += self.training
        self.seen = self.seen + 2**60
        return super().forward(input)


def test_extra_state_is_saved_and_a_resume_goes_on_with_it(tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(config(whole, max_steps=3, prove="off"), Own(Counts))
    train(config(parted, prove="off"), Own(Counts))
    train(
        config(parted, max_steps=3, prove="off", resume="auto", resume_changed="max_steps"),
        Own(Counts),
    )
    states = [
        json.loads(bytes(saved(out)["model/_extra_state"].tolist())) for out in (whole, parted)
    ]
    assert [state["calls"] for state in states] == [6, 6]
    exported = Counts()
    fill(exported, Checkpoint(max((parted / "checkpoints").iterdir())))
    assert exported.calls == 6
    assert states[0]["more"][1:] == [None, "text"]


def test_extra_state_of_the_main_rank_reaches_the_others() -> None:
    main, other = [Counts(), Counts()], [Counts(), Counts()]
    main[0](torch.ones(1, 8))
    main[0].calls = 1234567  # more digits than the other rank's
    on_two_ranks(share_extra_state, nn.Sequential(*main), nn.Sequential(*other))
    assert [layer.calls for layer in other] == [1234567, 0]
    assert torch.equal(other[0].seen, main[0].seen)


def test_extra_state_round_trips_and_damaged_bytes_are_refused() -> None:
    one, other = Counts(), Counts()
    one(torch.ones(1, 8))
    encoded = extra_state(one)
    load_extra_state(other, encoded)
    assert other.calls == 1
    assert torch.equal(other.seen, one.seen)
    with pytest.raises(DistcoreError, match=r"model/_extra_state: damaged: it is no extra state"):
        load_extra_state(other, {"_extra_state": encoded["_extra_state"][:-3]})


class Pickled(nn.Linear):
    """A layer whose extra state no JSON text can hold."""

    def __init__(self) -> None:
        super().__init__(8, 1)

    def get_extra_state(self) -> object:
        return {"who": object()}


class Wide(nn.Linear):
    """A layer with a buffer that no safetensors file can have."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))


class Sparse(nn.Linear):
    """A layer with a sparse buffer."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.register_buffer("graph", torch.eye(3).to_sparse())


REFUSED = [
    (
        Pickled(),
        TaskError,
        "the model's _extra_state cannot be saved: it holds a object; get_extra_state",
    ),
    (
        Wide(),
        ModelError,
        "'phase' is of torch.complex128, which no checkpoint can have .*persistent=False",
    ),
    (Sparse(), ModelError, "'graph' is sparse, which no checkpoint can have"),
    (
        nn.Sequential(nn.LazyLinear(2)),
        ModelError,
        "'0.weight' has no shape before a first forward pass: give",
    ),
]


@pytest.mark.parametrize(("module", "kind", "line"), REFUSED)
def test_a_tensor_that_cannot_be_saved_or_trained_is_refused_by_name(
    module: nn.Module, kind: type[DistcoreError], line: str
) -> None:
    with pytest.raises(kind, match=line):
        check_module(RunConfig(nproc=1), PLAIN, module)


def test_a_refusal_comes_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"complex128"):
        train(config(tmp_path / "run"), Own(Wide))
    assert not (tmp_path / "run/checkpoints").exists()


def test_embeddings_that_write_themselves_are_refused_where_copies_would_miss_it() -> None:
    module = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
    check_module(RunConfig(nproc=1), PLAIN, module)
    line = (
        r"'one' on {}: the forward pass of '0' writes its weights \(max_norm = 1.0\), .*--strategy"
        r" single"
    )
    sharded = Capabilities(spec_version=3, shards_parameters=True)
    masters = Capabilities(spec_version=3, owns=frozenset({"optimizer"}))
    for ranks, capabilities in ((2, PLAIN), (1, sharded), (1, masters)):
        with pytest.raises(ModelError, match=line.format(f"{ranks} rank{'s' * (ranks > 1)}")):
            check_module(RunConfig(nproc=ranks, strategy="one"), capabilities, module)


def test_a_synchronized_batch_norm_is_refused_on_cpu_ranks() -> None:
    module = nn.Sequential(nn.SyncBatchNorm(4))
    check_module(RunConfig(nproc=1, device="cpu"), PLAIN, module)
    with pytest.raises(ModelError, match="'0' is a SyncBatchNorm, which torch has for GPUs only"):
        check_module(RunConfig(nproc=2, device="cpu"), PLAIN, module)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_a_strategy_loses_is_refused_by_name(register: str) -> None:
    layer = nn.Linear(2, 2)
    module = nn.Sequential(layer)
    getattr(layer.weight, register)(lambda gradient: None)
    hooked = hooked_parameters(module)
    refuse_lost_hooks("one", module, hooked)
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    with pytest.raises(
        ModelError, match=r"'one' replaces the parameters of a model, and the hook .* '0.weight' is"
    ):
        refuse_lost_hooks("one", module, hooked)


class RandomRows(torch.utils.data.Dataset[Any]):
    """Rows with other noise each time."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> Any:
        return (X[row] + torch.randn(8),)


class EvaluatesRandomRows(Own):
    """A task whose evaluation rows are random."""

    def data(self) -> Any:
        return TensorDataset(X), RandomRows()


def test_random_evaluation_rows_are_refused_before_the_first_step(tmp_path: Path) -> None:
    line = (
        r"batch\(\) gives other values for the same rows each time .*metrics would follow from"
        r" ranks and loader"
    )
    for workers in (0, 1):
        with pytest.raises(TaskError, match=line):
            train(
                config(tmp_path / str(workers), prove="off", loader={"workers": workers}),
                EvaluatesRandomRows(Line),
            )
        assert not (tmp_path / str(workers) / "checkpoints").exists()


class Line(nn.Linear):
    """A plain layer."""

    def __init__(self) -> None:
        super().__init__(8, 1)


class Slopes(Own):
    """A loss that takes a gradient with respect to its inputs."""

    create_graph = True

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, None, None, self.create_graph)
        return super().row_loss(model, batch) + slope.square().sum(1)


class DetachedSlopes(Slopes):
    """The same without a gradient of the gradient."""

    create_graph = False


def capable(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(
        SingleStrategy, "capabilities", replace(SingleStrategy.capabilities, **changes)
    )


@pytest.mark.parametrize(
    ("task", "inner", "refused"),
    [
        (Slopes, "all", ""),
        (Slopes, "first", r"torch.autograd.grad\(create_graph=True\), and strategy 'single'"),
        (DetachedSlopes, "first", ""),
        (
            DetachedSlopes,
            "none",
            "torch.autograd.grad, and strategy 'single' with these options cannot",
        ),
    ],
)
def test_gradients_inside_a_loss_are_refused_where_a_strategy_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: type[Own], inner: str, refused: str
) -> None:
    capable(monkeypatch, inner_gradients=inner)
    original = torch.autograd.grad
    with pytest.raises(TaskError, match=refused) if refused else nullcontext():
        train(config(tmp_path / "run"), task(Line))
    assert torch.autograd.grad is original
    assert (tmp_path / "run/checkpoints").exists() is not bool(refused)


class Rooms(nn.Linear):
    """A layer with a parameter without elements, and a frozen one."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.frozen_room = nn.Parameter(torch.empty(0), requires_grad=False)
        self.room = nn.Parameter(torch.empty(0, 2))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (
            nn.Sequential(nn.Embedding(4, 2, sparse=True)),
            "takes no sparse gradients, as the model's '0.weight' has",
        ),
        (AllStates(), "takes no complex parameters, as the model's 'turn' has: keep real and"),
        (
            Rooms(),
            "takes no parameters without elements, as the model's 'room' has: make it a buffer, or",
        ),
    ],
)
def test_kinds_of_parameters_that_a_backend_lacks_are_refused_by_name(
    module: nn.Module, line: str
) -> None:
    lacks: Any = frozenset(
        {"sparse gradients", "complex parameters", "parameters without elements"}
    )
    check_module(RunConfig(nproc=1), PLAIN, module)
    with pytest.raises(ModelError, match=line):
        check_module(RunConfig(nproc=1), replace(PLAIN, lacks=lacks), module)


class ScalesGradients:
    """An extension that changes gradients before the step."""

    @hookimpl(wrapper=True)
    def step(self) -> Any:
        return (yield)


class Looks(ScalesGradients):
    """An extension that only looks at the step."""

    only_looks = True


def test_a_wrapper_of_the_step_is_refused_where_it_would_find_no_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Hooks("one", SingleStrategy(), {"mine": ScalesGradients()})
    capable(monkeypatch, hides_gradients=True)
    Hooks("one", SingleStrategy(), {"mine": Looks()})
    with pytest.raises(
        StrategyError,
        match=r"extension 'mine' wraps step\(\), and strategy 'one' .* only_looks = Tr",
    ):
        Hooks("one", SingleStrategy(), {"mine": ScalesGradients()})


USER_FILE = """
import torch
from torch.utils.data import TensorDataset
from distcore import Simple

X = torch.arange(128.0).reshape(16, 8) / 128

class Mine(Simple):
    def data(self):
        return TensorDataset(X), TensorDataset(X[:4])

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.{}(), torch.nn.Linear(4, 1))

    def row_loss(self, model, batch):
        return model(batch[0]).square()[:, 0]
"""


def test_a_task_file_that_has_changed_since_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another activation has the same shapes, so the weights fit."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE.format("Tanh"))
    given = {"task": "mine.py:Mine", "out": "run", "prove": "off"}
    train(RunConfig(**CONFIG | given))
    [path] = (tmp_path / "run/checkpoints").iterdir()
    state = json.loads((path / "state.json").read_text())
    assert state["sources"] == {"task": hashlib.sha256(file.read_bytes()).hexdigest()}
    configured = RunConfig(**CONFIG | given)
    warn_of_changed_sources(path, state, configured)
    assert "has changed" not in caplog.text
    file.write_text(USER_FILE.format("ReLU"))
    warn_of_changed_sources(path, state, configured)
    assert (
        "step-00000002: mine.py has changed since the run that saved it: model, rows or loss may be"
        in caplog.text
    )
    caplog.clear()
    (tmp_path / "before.py").write_text(USER_FILE.format("Tanh"))
    warn_of_changed_sources(path, state, configured, "before.py:Mine")
    warn_of_changed_sources(path, {"sources": "damaged"}, configured)
    assert not caplog.text
    train(
        RunConfig(
            **CONFIG | given | {"max_steps": 3, "resume": "auto", "resume_changed": "max_steps"}
        )
    )
    assert "mine.py has changed since the run that saved it" in caplog.text


def test_a_loss_that_uses_a_sharded_parameter_is_told_so() -> None:
    """torch's own words for it; the message of any other error stays."""
    cpu = SimpleNamespace(device=torch.device("cpu"))
    run: Any = SimpleNamespace(world=cpu, capabilities=PLAIN, config=RunConfig())
    hooks: Any = SimpleNamespace(name="one")
    words = (
        "aten.add.Tensor got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to"
        " DTensor before"
    )
    with (
        pytest.raises(
            TaskError,
            match=r"'one' shards parameters, and the loss uses one outside of model\(\.\.\.\)",
        ),
        explain_mixed_devices(run, hooks),
    ):
        raise RuntimeError(words)
    with (
        pytest.raises(
            TaskError,
            match=r"uses a model that was built to find out its shapes, not the one that .*'one'",
        ),
        explain_mixed_devices(run, hooks),
    ):
        raise AssertionError(
            "Please convert all Tensors to FakeTensors first or instantiate FakeTensorMode with"
        )
    with pytest.raises(RuntimeError, match="another"), explain_mixed_devices(run, hooks):
        raise RuntimeError("another")
    with pytest.raises(AssertionError, match="of a user"), explain_mixed_devices(run, hooks):
        raise AssertionError("of a user")


SIXTEEN = torch.ones(2, 2, dtype=torch.bfloat16)
WIDE = torch.ones(2, 2)
MIXTURES: dict[str, Any] = {
    "a matrix": lambda: nn.functional.linear(WIDE, SIXTEEN),
    "a batch of them": lambda: torch.bmm(WIDE[None], SIXTEEN[None]),
    "a sum of one": lambda: torch.addmm(WIDE, SIXTEEN, SIXTEEN),
    "a convolution": lambda: nn.functional.conv1d(WIDE[None], SIXTEEN[:, :, None], SIXTEEN[0]),
    "a normalization": lambda: nn.functional.layer_norm(WIDE, (2,), SIXTEEN[0], SIXTEEN[0]),
    "attention": lambda: nn.functional.scaled_dot_product_attention(
        WIDE[None], SIXTEEN[None], SIXTEEN[None]
    ),
    "an assignment": lambda: SIXTEEN.clone().index_put_((torch.tensor([0]),), WIDE[:1]),
}


class TwoLayers(nn.Sequential):
    """A net of two layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))


class Clips:
    """An extension that bounds the weights after each step, past torch's count of writes."""

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        for parameter in run.module.parameters():
            parameter.data.clamp_(-0.01, 0.01)


class Reads:
    """An extension that reads them."""

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        self.sums = [float(parameter.sum()) for parameter in run.module.parameters()]


def test_weights_that_a_listener_writes_are_the_runs_and_no_alarm_of_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, extension, proved in (("clips", Clips(), 0), ("reads", Reads(), 2)):
        monkeypatch.setattr(
            trainer, "load_extensions", lambda config, extension=extension: {"mine": extension}
        )
        train(config(tmp_path / name, max_steps=3), Own(TwoLayers))
        told = json.loads((tmp_path / name / "report.json").read_text())["proof"]
        assert told["steps"] == proved
        if not proved:
            why = (
                r"a listener writes the weight '.+' in on_step_end\(\), and one plain process has"
                r" no extensions"
            )
            assert re.fullmatch(why, told["why"])
    assert all(float(value.abs().max()) <= 0.01 for value in saved(tmp_path / "clips").values())


def test_weights_that_a_listener_writes_are_refused_where_an_engine_steps_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owns = replace(SingleStrategy.capabilities, hides_gradients=True, owns=frozenset({"optimizer"}))
    monkeypatch.setattr(SingleStrategy, "capabilities", owns)
    monkeypatch.setattr(trainer, "load_extensions", lambda config: {"mine": Clips()})
    with pytest.raises(
        TaskError,
        match=r"a listener writes the weight '.+' in on_step_end\(\), and strategy 'single'",
    ):
        train(config(tmp_path / "run"), Own(TwoLayers))


@pytest.mark.parametrize("case", MIXTURES)
def test_an_fp32_tensor_of_a_module_beside_weights_of_16_bits_is_told_so(case: str) -> None:
    """An engine that holds them in 16 bits computes without autocast, which casts
    both under other strategies.
    """
    run: Any = SimpleNamespace(
        world=SimpleNamespace(device=torch.device("cpu")),
        capabilities=replace(PLAIN, owns=frozenset({"precision"})),
        config=RunConfig(precision="bf16"),
    )
    hooks: Any = SimpleNamespace(name="one")
    says = (
        r"strategy 'one' computes with weights in bf16, and .* beside one of them \(.+\): have the"
        r" module make its "
        r"tensors .*; raised at \S+test_own_modules.py:\d+$"
    )
    with pytest.raises(TaskError, match=says), explain_mixed_devices(run, hooks):
        MIXTURES[case]()
    run.capabilities = PLAIN
    with pytest.raises(RuntimeError) as told, explain_mixed_devices(run, hooks):
        MIXTURES[case]()
    assert not isinstance(told.value, DistcoreError)


class Grows(nn.Linear):
    """A layer whose first pass makes a parameter."""

    def __init__(self) -> None:
        super().__init__(8, 1)

    def forward(self, input: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(1))
        return super().forward(input) * self.scale


def test_a_parameter_that_the_first_pass_makes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError,
        match=r"the first forward pass made the parameter 'scale': .* make it in __init__",
    ):
        train(config(tmp_path / "run"), Own(Grows))
    assert not (tmp_path / "run/checkpoints").exists()


class Unfreezes(Own):
    """A task whose last layer is frozen until an epoch has passed."""

    def model(self) -> nn.Module:
        self.net: Any = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
        self.net[-1].weight.requires_grad_(False)
        return self.net

    @hookimpl
    def on_epoch_end(self) -> None:
        self.net[-1].weight.requires_grad_(True)


def test_a_parameter_that_becomes_trainable_after_the_start_is_refused_by_name(
    tmp_path: Path,
) -> None:
    says = (
        r"after step \d+ '\d+.weight' is trainable, which was frozen at the start: the optimizer"
        r" does not step it"
    )
    with pytest.raises(TaskError, match=says):
        train(
            RunConfig(**CONFIG | {"out": str(tmp_path / "run"), "max_steps": 6, "log_every": 1}),
            Unfreezes(nn.Module),
        )

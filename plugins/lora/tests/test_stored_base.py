"""A frozen base in 16 bits has the losses and the adapter of the same base in fp32, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_bases import RUNS, adapted, folder_of, job, result, steps, trained_base
from torch import Tensor, nn
from torch.nn import functional as F

from distcore.cli.main import main
from distcore.errors import ConfigError
from distcore.model.model_source import base_source, model_source
from distcore.resolve.resolve import resolve
from distcore_lora.adapter import inject
from distcore_lora.stored_base import MODEL_TYPES
from distcore_lora.stored_layers import StoredEmbedding, StoredLinear

pytestmark = pytest.mark.programs

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def is_equal(folder: Path, kind: str, half: bool) -> bool:
    (losses, trained), (own, same) = (
        steps(adapted(folder, base, kind), half) for base in ("fp32", "file")
    )
    pairs = [*zip(losses, own, strict=True), *zip(trained, same, strict=True)]
    return all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_each_model_type_has_the_bits_of_a_base_in_fp32(
    kind: str, dtype: str, half: bool, tmp_path: Path
) -> None:
    assert is_equal(folder_of(tmp_path, kind, HALVES[dtype]), kind, half)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_layers_and_embeddings_alone_are_kept(kind: str, tmp_path: Path) -> None:
    model = adapted(folder_of(tmp_path, kind, torch.bfloat16), "auto", kind)
    kept = [part for part in model.modules() if isinstance(part, StoredLinear | StoredEmbedding)]
    weights = {id(part.weight) for part in kept}
    assert all((p.dtype == torch.bfloat16) is (id(p) in weights) for p in model.parameters())
    whole, frozen = (
        sum(p.numel() for p in model.parameters() if test(p)) for test in (_is_any, _is_kept)
    )
    assert frozen > 0.8 * whole
    assert not any(p.dtype == torch.bfloat16 for p in model.parameters() if p.requires_grad)


def _is_any(parameter: Tensor) -> bool:
    return not parameter.requires_grad


def _is_kept(parameter: Tensor) -> bool:
    return parameter.dtype == torch.bfloat16


def rounds_inputs(self: Any, given: Tensor) -> Tensor:
    return F.linear(given.to(self.weight.dtype), self.weight, _half(self)).to(given.dtype)


def _half(layer: Any) -> Tensor | None:
    return None if layer.bias is None else layer.bias.to(layer.weight.dtype)


def stays_narrow(self: Any, given: Tensor) -> Tensor:
    rows: Tensor = nn.Embedding.forward(self, given)
    return (rows * 1.01).float()


BROKEN: list[tuple[type, Callable[..., Tensor]]] = [
    (StoredLinear, rounds_inputs),
    (StoredEmbedding, stays_narrow),
]


@pytest.mark.parametrize(("layer", "forward"), BROKEN)
def test_a_layer_that_rounds_is_seen(
    layer: type, forward: Callable[..., Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "forward", forward)
    assert not is_equal(folder_of(tmp_path, "llama", torch.bfloat16), "llama", half=False)


@pytest.mark.parametrize(
    ("kind", "dtype", "changes", "why"),
    [
        ("gpt2", torch.bfloat16, {}, "the model type gpt2 is none of bert, "),
        ("llama", torch.bfloat16, {"compile": "regions"}, "compiled code was not compared with it"),
        ("llama", None, {}, "the weights in .* are BF16 and F32"),
    ],
)
def test_a_base_that_cannot_stay_as_stored_is_one_line(
    kind: str, dtype: torch.dtype | None, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder_of(tmp_path, kind, dtype or torch.bfloat16)
    if dtype is None:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=rf"^lora.base = 'file': {why}.*; use --set lora.base=fp32$"
    ):
        adapted(tmp_path, "file", kind, **changes)
    model = adapted(tmp_path, "auto", kind, **changes)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_files_in_fp32_stay_in_fp32(tmp_path: Path) -> None:
    model = adapted(folder_of(tmp_path, "llama", torch.float32), "file", "llama")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# Runs


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained Llama in bf16."""
    return trained_base(tmp_path_factory.mktemp("base"))


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("strategy", "precision"), RUNS)
def test_every_strategy_has_the_bits_of_a_base_in_fp32(
    strategy: str, precision: str, base: Path
) -> None:
    given: dict[str, Any] = {
        "strategy": strategy,
        "nproc": 1 if strategy == "single" else 2,
        "precision": precision,
    }
    name = f"{strategy}-{precision}"
    (losses, tensors), (own, same) = (
        result(base, name, kind, **given) for kind in ("fp32", "file")
    )
    assert own == losses
    assert same.keys() == tensors.keys()
    assert all(torch.equal(same[key], tensors[key]) for key in tensors)


def test_an_export_merges_into_fp32(base: Path) -> None:
    merged = []
    for kind in ("fp32", "file"):
        result(base, "merged", kind, strategy="single", nproc=1)
        to = base / f"to-{kind}"
        command = ["checkpoint", "export", str(base / f"merged-{kind}"), "--to", str(to)]
        command += ["--merged"]
        assert main(command) == 0
        merged.append(load_file(to / "model.safetensors"))
    whole, own = merged
    assert all(
        own[name].dtype == torch.float32 and torch.equal(own[name], whole[name]) for name in whole
    )


def test_a_meta_model_has_the_dtypes_of_the_whole_one(base: Path) -> None:
    for kind, least, most in (("fp32", 4.0, 4.0), ("file", 2.0, 2.1)):
        resolved = resolve(job(base, "meta", str(base / "model"), lora={"rank": 2, "base": kind}))
        source = model_source(
            resolved.config, resolved.task, resolved.task.prepare(resolved.config)
        )
        whole, meta = (
            {
                name: parameter.dtype
                for name, parameter in model.named_parameters()
                if not parameter.requires_grad
            }
            for model in (source.build(), source.meta_model())
        )
        assert meta == whole
        sizes = [
            (p.numel(), p.dtype.itemsize)
            for p in source.meta_model().parameters()
            if not p.requires_grad
        ]
        assert (
            least
            <= sum(count * size for count, size in sizes) / sum(count for count, _ in sizes)
            <= most
        )


@pytest.mark.parametrize("kind", ["fp32", "file", "nf4"])
def test_a_base_that_is_read_tensor_by_tensor_is_that_of_a_whole_load(
    kind: str, base: Path
) -> None:
    resolved = resolve(job(base, "parts", str(base / "model"), lora={"rank": 2, "base": kind}))
    config, data = resolved.config, resolved.task.prepare(resolved.config)
    whole = base_source(config, resolved.task, data).build()
    inject(config, whole, base / "model")
    source = model_source(config, resolved.task, data)
    assert source.replay is not None
    meta_model, values = source.replay()
    own = dict(whole.named_parameters())
    built = source.build()
    assert [(name, p.dtype) for name, p in meta_model.named_parameters()] == [
        (name, p.dtype) for name, p in own.items()
    ]
    for name, parameter in built.named_parameters():
        assert torch.equal(parameter, own[name])
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(built.buffers(), whole.buffers(), strict=True)
    )
    # parts that end inside of rows, too
    for first, last in ((0.0, 1.0), (0.21, 0.4), (0.5, 0.5), (0.93, 1.0)):
        ranges = {name: (int(first * p.numel()), int(last * p.numel())) for name, p in own.items()}
        wanted = {name: (start, stop - start) for name, (start, stop) in ranges.items()}
        read = dict(values(wanted.__getitem__))
        assert read.keys() == own.keys()
        for name, (start, stop) in ranges.items():
            assert torch.equal(
                read[name].to(own[name].dtype), own[name].detach().flatten()[start:stop]
            )

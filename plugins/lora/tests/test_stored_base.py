"""A frozen base in 16 bits has the losses and the adapter of the same base in fp32, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from distcore import RunConfig, train
from distcore.checkpoint import Checkpoint
from distcore.cli.main import main
from distcore.errors import ConfigError
from distcore.model.model_source import model_source
from distcore.resolve.resolve import resolve
from distcore_lora.adapter import inject
from distcore_lora.stored_base import MODEL_TYPES, StoredEmbedding, StoredLinear

pytestmark = pytest.mark.programs

SMALL: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "embedding_size": 32,
}  # fmt: skip
DISTILBERT = {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
ENCODERS = ("bert", "distilbert", "electra", "roberta", "xlm-roberta")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def folder_of(folder: Path, kind: str, dtype: torch.dtype) -> Path:
    """A folder with random weights in ``dtype``."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(DISTILBERT if kind == "distilbert" else SMALL))
    loader = transformers.AutoModelForMaskedLM if kind in ENCODERS else transformers.AutoModelForCausalLM
    model = loader.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.to(dtype).save_pretrained(folder)
    return folder


def adapted(folder: Path, base: str, kind: str, **changes: Any) -> Any:
    """The model of ``folder``, in fp32, with an adapter that does something."""
    loader: Any = transformers.AutoModelForMaskedLM if kind in ENCODERS else transformers.AutoModelForCausalLM
    model = loader.from_pretrained(folder).float().eval()
    inject(RunConfig(**{"lora": {"rank": 2, "alpha": 4.0, "base": base}, "seed": 0} | changes), model, folder)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return model


def steps(model: Any, half: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of three steps, and the trained parameters after them."""
    torch.manual_seed(2)
    tokens = torch.randint(3, 100, (4, 12))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [parameter.detach() for parameter in trained]


def is_equal(folder: Path, kind: str, half: bool) -> bool:
    (losses, trained), (own, same) = (steps(adapted(folder, base, kind), half) for base in ("fp32", "file"))
    pairs = [*zip(losses, own, strict=True), *zip(trained, same, strict=True)]
    return all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_each_model_type_has_the_bits_of_a_base_in_fp32(kind: str, dtype: str, half: bool, tmp_path: Path) -> None:
    assert is_equal(folder_of(tmp_path, kind, HALVES[dtype]), kind, half)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_layers_and_embeddings_alone_are_kept(kind: str, tmp_path: Path) -> None:
    model = adapted(folder_of(tmp_path, kind, torch.bfloat16), "auto", kind)
    kept = [part for part in model.modules() if isinstance(part, StoredLinear | StoredEmbedding)]
    weights = {id(part.weight) for part in kept}
    assert all((p.dtype == torch.bfloat16) is (id(p) in weights) for p in model.parameters())
    whole, frozen = (sum(p.numel() for p in model.parameters() if test(p)) for test in (_is_any, _is_kept))
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


BROKEN: list[tuple[type, Callable[..., Tensor]]] = [(StoredLinear, rounds_inputs), (StoredEmbedding, stays_narrow)]


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
def test_where_it_cannot_be_one_line_says_so(
    kind: str, dtype: torch.dtype | None, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder_of(tmp_path, kind, dtype or torch.bfloat16)
    if dtype is None:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"^lora.base = 'file': {why}.*; use --set lora.base=fp32$"):
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
    folder = tmp_path_factory.mktemp("base")
    lines = [{"text": " ".join(["one", "two", "three", "four"][: i % 4 + 1] * (i % 5 + 1))} for i in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    train(job(folder, "whole", model="llama-tiny", tokenizer={"vocab_size": 300}))
    assert main(["checkpoint", "export", str(folder / "whole"), "--to", str(folder / "model")]) == 0
    tensors = load_file(folder / "model/model.safetensors")
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(half, folder / "model/model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


def job(folder: Path, out: str, model: str, tokenizer: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    options = {"tokenizer": tokenizer} if tokenizer else {}
    given: dict[str, Any] = {
        "task": "causal-lm", "data": str(folder / "rows.jsonl"), "model": model, "task_options": options,
        "out": str(folder / out), "device": "cpu", "max_steps": 3, "global_batch_size": 8, "max_seq_len": 16,
        "dropout": 0.0, "log_every": 1, "log_level": "error", "extensions": {"progress": False}, "lr": 1e-2,
        "precision": "fp32",
    }  # fmt: skip
    return RunConfig(**given | changes)


def result(folder: Path, name: str, base: str, **changes: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a run with an adapter, and the tensors of its checkpoint."""
    out = f"{name}-{base}".replace(":", "_").replace("=", "_")
    report = train(job(folder, out, str(folder / "model"), lora={"rank": 2, "base": base}, **changes))
    lines = map(json.loads, (folder / out / "metrics.jsonl").read_text().splitlines())
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    checkpoint = Checkpoint(max((folder / out / "checkpoints").iterdir()))
    tensors = {key: checkpoint[key] for key in checkpoint if key.startswith("model/")}
    return [*losses, report["evaluation"]["loss"]], tensors


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "strategy",
    [
        "single",
        "ddp",
        "fsdp",
        "fsdp:param_dtype=precision",
        "deepspeed:2",
        "deepspeed:3",
        "mesh:shard=2",
        "mesh:tp=2",
        "horovod",
        "accelerate",
    ],
)
def test_every_strategy_has_the_bits_of_a_base_in_fp32(strategy: str, precision: str, base: Path) -> None:
    given: dict[str, Any] = {"strategy": strategy, "nproc": 1 if strategy == "single" else 2, "precision": precision}
    name = f"{strategy}-{precision}"
    (losses, tensors), (own, same) = (result(base, name, kind, **given) for kind in ("fp32", "file"))
    assert own == losses
    assert same.keys() == tensors.keys()
    assert all(torch.equal(same[key], tensors[key]) for key in tensors)


def test_an_export_merges_into_fp32(base: Path) -> None:
    merged = []
    for kind in ("fp32", "file"):
        result(base, "merged", kind, strategy="single", nproc=1)
        to = base / f"to-{kind}"
        assert main(["checkpoint", "export", str(base / f"merged-{kind}"), "--to", str(to), "--merged"]) == 0
        merged.append(load_file(to / "model.safetensors"))
    whole, own = merged
    assert all(own[name].dtype == torch.float32 and torch.equal(own[name], whole[name]) for name in whole)


def test_a_meta_model_has_the_dtypes_of_the_whole_one(base: Path) -> None:
    for kind, least, most in (("fp32", 4.0, 4.0), ("file", 2.0, 2.1)):
        resolved = resolve(job(base, "meta", str(base / "model"), lora={"rank": 2, "base": kind}))
        source = model_source(resolved.config, resolved.task, resolved.task.prepare(resolved.config))
        whole, meta = (
            {name: parameter.dtype for name, parameter in model.named_parameters() if not parameter.requires_grad}
            for model in (source.build(), source.meta_model())
        )
        assert meta == whole
        sizes = [(p.numel(), p.dtype.itemsize) for p in source.meta_model().parameters() if not p.requires_grad]
        assert least <= sum(count * size for count, size in sizes) / sum(count for count, _ in sizes) <= most

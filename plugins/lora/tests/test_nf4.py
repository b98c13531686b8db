"""A base in NF4 has the bytes of bitsandbytes, and the losses and adapter of the same
base dequantized to fp32.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored_bases
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from distcore import CheckpointError, ConfigError, RunConfig, train
from distcore.cli.main import main
from distcore.model.model_source import model_source
from distcore.resolve.resolve import resolve
from distcore_lora import nf4
from distcore_lora.adapter import inject
from distcore_lora.stored_base import MODEL_TYPES, widen
from distcore_lora.stored_layers import QuantizedLinear

WIDE = {"hidden_size": 64, "intermediate_size": 128, "embedding_size": 64, "head_dim": 32}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def some_rows(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    rows = torch.randn(40, 256)
    rows[3, :64] = 0
    rows[5] *= 1e-6
    return rows.to(dtype)


MADE_BY_BITSANDBYTES = {
    torch.float32: "b0f70d4cefa04a71",
    torch.bfloat16: "4f6c67fde8e6d070",
    torch.float16: "6435b11db4f3a6dc",
}
"""The first digits of the SHA-256 of codes and scales that bitsandbytes
0.50.2 makes of ``some_rows``.
"""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_that_bitsandbytes_made(dtype: torch.dtype) -> None:
    packed = nf4.quantize(some_rows(dtype))
    assert sha256_of(*in_their_order(packed)) == MADE_BY_BITSANDBYTES[dtype]


def in_their_order(packed: Tensor) -> tuple[Tensor, Tensor]:
    """All codes, then all scales."""
    blocks = packed.view(-1, nf4.BLOCK_BYTES)
    return blocks[:, :32].contiguous(), blocks[:, 32:].contiguous()


def sha256_of(codes: Tensor, scales: Tensor) -> str:
    parts = b"".join(
        part.contiguous().view(torch.uint8).numpy().tobytes() for part in (codes, scales)
    )
    return hashlib.sha256(parts).hexdigest()[:16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_and_values_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    library: Any = pytest.importorskip("bitsandbytes").functional
    rows = some_rows(dtype)
    theirs, state = library.quantize_4bit(rows, blocksize=nf4.BLOCK, quant_type="nf4")
    packed = nf4.quantize(rows)
    assert packed.shape == (40, nf4.bytes_of_row(256))
    codes, scales = in_their_order(packed)
    assert torch.equal(codes.reshape(-1, 1), theirs)
    assert torch.equal(scales.view(torch.float32).flatten(), state.absmax)
    assert sha256_of(theirs, state.absmax) == MADE_BY_BITSANDBYTES[dtype]
    assert torch.equal(nf4.dequantize(packed).to(dtype), library.dequantize_4bit(theirs, state))


def test_any_rows_are_made_from_the_same_rows() -> None:
    rows = some_rows(torch.bfloat16)
    packed = nf4.quantize(rows)
    assert torch.equal(
        torch.cat([nf4.quantize(rows[:7]), nf4.quantize(rows[7:7]), nf4.quantize(rows[7:])]), packed
    )
    assert torch.equal(nf4.dequantize(packed[7:20]), nf4.dequantize(packed)[7:20])


def test_any_blocks_are_made_from_the_same_columns() -> None:
    rows = some_rows(torch.bfloat16)
    packed = nf4.quantize(rows)
    first, last = nf4.quantize(rows[:, :64]), nf4.quantize(rows[:, 64:])
    assert torch.equal(torch.cat([first, last], 1), packed)
    assert torch.equal(nf4.dequantize(packed[:, 36:108]), nf4.dequantize(packed)[:, 64:192])


def test_dequantized_weights_are_quantized_to_the_same_bytes() -> None:
    packed = nf4.quantize(some_rows(torch.float32))
    assert torch.equal(nf4.quantize(nf4.dequantize(packed)), packed)
    assert packed.numel() / 40 / 256 == 0.5625


def folder_of(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    return stored_bases.folder_of(folder, kind, dtype, **WIDE)


def is_equal(folder: Path, kind: str, half: bool) -> bool:
    quantized, plain = (stored_bases.adapted(folder, "nf4", kind) for _ in range(2))
    widen(plain)
    assert not any(isinstance(part, QuantizedLinear) for part in plain.modules())
    (losses, trained), (own, same) = (
        stored_bases.steps(model, half) for model in (plain, quantized)
    )
    pairs = [*zip(losses, own, strict=True), *zip(trained, same, strict=True)]
    return all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.programs
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_each_model_type_has_the_bits_of_a_dequantized_base(
    kind: str, half: bool, tmp_path: Path
) -> None:
    assert is_equal(folder_of(tmp_path, kind), kind, half)


def next_scale(packed: Tensor) -> Tensor:
    return RIGHT(packed).roll(1, 0)


def rounded(packed: Tensor) -> Tensor:
    return RIGHT(packed).bfloat16().float()


RIGHT = nf4.dequantize
BROKEN: list[Callable[[Tensor], Tensor]] = [next_scale, rounded]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_layer_with_other_weights_is_seen(
    broken: Callable[[Tensor], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, "llama")
    plain, quantized = (stored_bases.adapted(folder, "nf4", "llama") for _ in range(2))
    widen(plain)
    monkeypatch.setattr(nf4, "dequantize", broken)
    assert not torch.equal(
        stored_bases.steps(plain, False)[0][0], stored_bases.steps(quantized, False)[0][0]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_are_bytes_and_the_rest_is_as_in_the_files(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = stored_bases.adapted(folder_of(tmp_path, "llama", dtype), "nf4", "llama")
    layers = [part for part in model.modules() if isinstance(part, QuantizedLinear)]
    assert len(layers) == 14
    assert all(part.weight.dtype == torch.uint8 for part in layers)
    assert type(model.lm_head) is not QuantizedLinear
    assert {model.lm_head.weight.dtype, model.model.embed_tokens.weight.dtype} == {dtype}
    assert model.model.norm.weight.dtype == torch.float32
    assert not any(p.dtype != torch.float32 for p in model.parameters() if p.requires_grad)


@pytest.mark.programs
def test_a_weight_of_two_layers_is_not_quantized(tmp_path: Path) -> None:
    loader: Any = transformers.AutoModelForCausalLM
    model = loader.from_pretrained(folder_of(tmp_path, "llama")).float()
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    inject(RunConfig(lora={"rank": 2, "alpha": 4.0, "base": "nf4"}, seed=0), model, tmp_path)
    assert not isinstance(first.q_proj.base_layer, QuantizedLinear)
    assert second.q_proj.base_layer.weight is first.q_proj.base_layer.weight
    assert isinstance(first.k_proj.base_layer, QuantizedLinear)


@pytest.mark.parametrize(
    ("kind", "sizes", "changes", "why"),
    [
        ("gpt2", WIDE, {}, "the model type gpt2 is none of bert, .*; use --set lora.base=fp32"),
        (
            "llama",
            {},
            {},
            (
                "model.layers.0.self_attn.q_proj.base_layer has rows of 32 weights, which are no"
                " whole blocks of 64; use --set lora.base=file"
            ),
        ),
        ("llama", WIDE, {"compile": "regions"}, "compiled code was not compared with it; .*"),
    ],
)
def test_a_base_that_cannot_be_in_nf4_is_one_line(
    kind: str, sizes: dict[str, Any], changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    stored_bases.folder_of(tmp_path, kind, torch.bfloat16, **sizes)
    with pytest.raises(ConfigError, match=rf"^lora.base = 'nf4': {why}$"):
        stored_bases.adapted(tmp_path, "nf4", kind, **changes)


# Runs


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained Llama in bf16, and, as ``wide``, the same with
    dequantized layers in fp32.
    """
    folder = stored_bases.trained_base(tmp_path_factory.mktemp("base"))
    shutil.copytree(folder / "model", folder / "wide")
    tensors = load_file(folder / "model/model.safetensors")
    wide = {
        name: nf4.dequantize(nf4.quantize(tensor)) if "_proj" in name else tensor.float()
        for name, tensor in tensors.items()
    }
    save_file(wide, folder / "wide/model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "wide/config.json").read_text())
    (folder / "wide/config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


@pytest.mark.ranks
@pytest.mark.programs
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("strategy", "precision"), stored_bases.RUNS)
def test_every_strategy_has_the_bits_of_a_dequantized_base(
    strategy: str, precision: str, base: Path
) -> None:
    given: dict[str, Any] = {
        "strategy": strategy,
        "nproc": 1 if strategy == "single" else 2,
        "precision": precision,
    }
    name = f"{strategy}-{precision}"
    losses, tensors = stored_bases.result(base, name, "fp32", model="wide", **given)
    own, same = stored_bases.result(base, name, "nf4", **given)
    assert own == losses
    assert same.keys() == tensors.keys()
    assert all(torch.equal(same[key], tensors[key]) for key in tensors)


@pytest.fixture(scope="module")
def trained(base: Path) -> Path:
    """The folder of ``base``, with a run of three steps on NF4."""
    stored_bases.result(base, "trained", "nf4", strategy="single", nproc=1)
    return base


@pytest.mark.programs
def test_a_resume_on_another_base_is_refused(trained: Path) -> None:
    resume = stored_bases.job(trained, "trained-nf4", str(trained / "model"), resume="auto")
    where = re.escape(str(trained / "model"))
    line = (
        rf"is an adapter of the weights in {where}, in NF4 in blocks of 64 \(SHA-256 \w+…\), not of"
        r" the weights in "
    )
    with pytest.raises(CheckpointError, match=line):
        train(resume.model_copy(update={"lora": resume.lora.model_copy(update={"rank": 2})}))


@pytest.mark.programs
def test_a_merged_export_is_the_dequantized_base_with_the_adapter(trained: Path) -> None:
    merged, adapted = (
        logits(export(trained, "merged", "--merged")),
        with_adapter(trained, load(trained / "wide")),
    )
    assert difference(merged, adapted) < 2e-6
    assert difference(merged, logits(trained / "wide")) > 1e-3  # so the adapter does something
    # another base, other answers
    assert difference(merged, with_adapter(trained, load(trained / "model"))) > 1e-3


@pytest.mark.programs
def test_peft_and_bitsandbytes_read_the_adapter_on_their_own_base(trained: Path) -> None:
    pytest.importorskip("bitsandbytes")
    four_bits: Any = transformers.BitsAndBytesConfig
    settings = four_bits(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    # its product rounds on a CPU
    theirs = load(trained / "model", quantization_config=settings).dequantize()
    assert (
        difference(with_adapter(trained, theirs), logits(export(trained, "theirs", "--merged")))
        < 2e-6
    )


@pytest.mark.programs
def test_an_export_says_which_base_it_needs_and_what_is_rounded(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "distcore")
    export(trained, "half", "--merged --dtype bf16")
    assert (
        "lora.base = nf4: the merged weights are rounded to bfloat16; fp32 keeps the answers of"
        " the run" in caplog.text
    )
    export(trained, "small", "")
    assert (
        "lora.base = nf4: on the base as its files have it, the adapter answers otherwise; load it"
        " in 4 bits" in caplog.text
    )


@pytest.mark.programs
def test_a_merged_export_is_rounded_once(trained: Path) -> None:
    whole, half = (
        load_file(export(trained, name, flags) / "model.safetensors")
        for name, flags in (("once-fp32", "--merged"), ("once-bf16", "--merged --dtype bf16"))
    )
    assert half.keys() == whole.keys()
    assert all(torch.equal(half[name], whole[name].bfloat16()) for name in whole)


@pytest.mark.programs
def test_a_base_is_never_built_whole(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, read = list[Any](), transformers.LlamaForCausalLM.from_pretrained

    def note(name: Any, **settings: Any) -> Any:
        asked.append(name)
        return read(name, **settings)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", note)
    resolved = resolve(
        stored_bases.job(trained, "parts", str(trained / "model"), lora={"rank": 2, "base": "nf4"})
    )
    source = model_source(resolved.config, resolved.task, resolved.task.prepare(resolved.config))
    assert not any(parameter.is_meta for parameter in source.build().parameters())
    assert set(asked) == {None}  # the shapes in the files alone were given to it


@pytest.mark.programs
@pytest.mark.needs("distcore-deepspeed", "distcore-workbench")
def test_a_plan_traces_bytes_that_are_partitioned(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = (
        f"--task causal-lm --model {trained}/model --data {trained}/rows.jsonl --max-seq-len 16"
        " --device cpu"
    )
    flags = "--lora 2 --set lora.base=nf4 --strategies deepspeed:3,fsdp --nproc 2 --json"
    assert main(["plan", *job.split(), *flags.split()]) == 0
    assert "cannot be traced" not in "".join(capfd.readouterr())


def export(trained: Path, name: str, flags: str) -> Path:
    run, to = str(trained / "trained-nf4"), trained / name
    assert main(["checkpoint", "export", run, "--to", str(to), *flags.split()]) == 0
    return to


def load(folder: Path, **changes: Any) -> Any:
    loader: Any = transformers.AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float32, **changes).eval()


def logits(folder: Path) -> Tensor:
    return answer(load(folder))


def with_adapter(trained: Path, model: Any) -> Tensor:
    import peft

    to = trained / "adapter"
    return answer(
        peft.PeftModel.from_pretrained(
            model, str(to if to.exists() else export(trained, "adapter", ""))
        )
    )


@torch.no_grad()
def answer(model: Any) -> Tensor:
    return torch.as_tensor(model(input_ids=torch.arange(3, 60)[None]).logits)


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())

"""LoRA trains the right layers of each model, and refuses the rest in one
line before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    RobertaConfig,
    RobertaForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from distcore import ConfigError, RunConfig, registry
from distcore.cli.main import main
from distcore.hints import how_to_get
from distcore.model.lora_base import base_of
from distcore.testing.problem import Classifier, Problem
from distcore_lora.adapter import adapted_kinds, inject, take_out

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
BERT = BertConfig(**SMALL)


def config(**lora: Any) -> RunConfig:
    return RunConfig(seed=3, lora={"rank": 2, "alpha": 4.0} | lora)


def adapted(model: nn.Module, folder: Path | None = None, **lora: Any) -> nn.Module:
    inject(config(**lora), model, folder)
    return model


def trained(model: nn.Module) -> set[str]:
    """The layers that are adapted, with ``+``, and those that are trained whole."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    layers = {f"+{name.partition('.lora_')[0]}" for name in names if ".lora_" in name}
    return layers | {
        name.partition(".modules_to_save.")[0] for name in names if ".modules_to_save." in name
    }


ATTENTION = {"+bert.encoder.layer.0.attention.self." + name for name in ("query", "key", "value")}
BLOCK = ATTENTION | {
    "+bert.encoder.layer.0." + name
    for name in ("attention.output.dense", "intermediate.dense", "output.dense")
}


def test_a_classifier_adapts_every_linear_layer_and_trains_its_head_whole() -> None:
    assert trained(adapted(BertForSequenceClassification(BERT))) == BLOCK | {
        "+bert.pooler.dense",
        "classifier",
    }


def test_a_line_says_which_kinds_of_modules_are_adapted_and_which_are_not() -> None:
    assert (
        adapted_kinds(adapted(LlamaForCausalLM(LlamaConfig(**SMALL))))
        == "adapted: down_proj (Linear), gate_proj (Linear), k_proj (Linear), o_proj (Linear),"
        " q_proj (Linear), up_proj (Linear), v_proj (Linear); not adapted: embed_tokens"
        " (Embedding), lm_head (Linear)"
    )
    kinds = adapted_kinds(adapted(BertForSequenceClassification(BERT), targets=("query",)))
    assert kinds.startswith(
        "adapted: query (Linear); trained whole: classifier (Linear); not adapted: dense (Linear), "
    )
    experts = MixtralConfig(**SMALL, num_local_experts=2, num_key_value_heads=2)
    kinds = adapted_kinds(adapted(MixtralForCausalLM(experts), targets=("q_proj",)))
    assert "experts (MixtralExperts)" in kinds.partition("not adapted: ")[2]


EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
}
"""Models whose experts are two weights for all of them."""


@pytest.mark.parametrize("kind", EXPERTS)
def test_a_merge_over_experts_answers_as_the_adapter_does(kind: str) -> None:
    sizes = SMALL | {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    shape = getattr(transformers, f"{kind}Config")(**sizes, **EXPERTS[kind])
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    base, tokens = auto.from_config(shape).eval(), torch.arange(2, 40)[None]
    with torch.no_grad():
        before = base(tokens).logits
    model = adapted(base)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        expected = model(tokens).logits
        merged = take_out(model, merge=True)
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, expected, atol=1e-2)
    assert not [name for name in merged.state_dict() if "lora" in name or "base_layer" in name]


@pytest.mark.parametrize("targets", [("query", "classifier"), "classifier", r"classifi.*"])
def test_a_target_that_is_trained_whole_is_refused_in_one_line(targets: object) -> None:
    says = (
        r"lora.targets: 'classif\S*' names no layer but classifier, which is trained whole, since"
        r" its weights are new"
    )
    with pytest.raises(ConfigError, match=says):
        adapted(BertForSequenceClassification(BERT), targets=targets)


def test_a_masked_language_model_keeps_the_layer_that_is_tied_to_its_embeddings() -> None:
    assert trained(adapted(BertForMaskedLM(BERT))) == BLOCK | {"+cls.predictions.transform.dense"}


@pytest.mark.parametrize(
    ("model", "head", "layers"),
    [
        (
            lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50)),
            None,
            4,
        ),
        (lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), None, 7),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(d_model=16, d_ff=8, num_layers=1, vocab_size=50)
            ),
            None,
            16,
        ),
        (lambda: ViTForImageClassification(ViTConfig(**SMALL)), "classifier", 6),
        (lambda: RobertaForTokenClassification(RobertaConfig(**SMALL)), "classifier", 6),
    ],
)
def test_no_head_of_a_model_is_adapted(model: Any, head: str | None, layers: int) -> None:
    names = trained(adapted(model()))
    assert {name for name in names if not name.startswith("+")} == ({head} if head else set())
    assert len(names) == layers + bool(head)


def test_a_head_of_several_layers_is_trained_whole() -> None:
    shape = DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=24)
    names = trained(adapted(DistilBertForSequenceClassification(shape)))
    assert {name for name in names if not name.startswith("+")} == {"pre_classifier", "classifier"}


def test_a_layer_that_the_files_lack_is_trained_whole(tmp_path: Path) -> None:
    """A pooler that stayed random would be another one for whoever loads the
    adapter on its base.
    """
    BertForMaskedLM(BERT).save_pretrained(tmp_path)
    names = trained(adapted(BertForSequenceClassification(BERT), tmp_path))
    assert names == BLOCK | {"classifier", "bert.pooler.dense"}


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (r".*\.(query|value)", {"query", "value"}),
        (["key"], {"key"}),
        (("self.query", "value"), {"query", "value"}),
    ],
)
def test_targets_are_a_pattern_or_ends_of_names(targets: object, layers: set[str]) -> None:
    names = trained(adapted(BertForMaskedLM(BERT), targets=targets))
    assert {name.rpartition(".")[2] for name in names} == layers


def test_an_adapter_begins_as_nothing_and_counts_alpha_over_rank() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    tokens = torch.arange(8)[None]
    before = model(tokens).logits
    adapted(model, rank=2, alpha=6.0)
    assert torch.equal(model(tokens).logits, before)
    layer: Any = model.model.layers[0].self_attn.q_proj
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        up.normal_()
    x = torch.randn(3, 16)
    assert torch.allclose(layer(x), layer.base_layer(x) + 6 / 2 * x @ down.T @ up.T, atol=1e-6)


def test_a_meta_model_gets_the_same_adapter_as_the_whole_model(tmp_path: Path) -> None:
    BertModel(BERT).save_pretrained(tmp_path)
    with torch.device("meta"):
        meta_model = BertForSequenceClassification(BERT)
    torch.manual_seed(9)  # what was drawn before says nothing of the adapter
    whole = BertForSequenceClassification(BERT)
    before = dict(whole.named_parameters())
    names, others = inject(config(), whole, tmp_path), inject(config(), meta_model, tmp_path)
    mine, theirs = dict(whole.named_parameters()), dict(meta_model.named_parameters())
    assert list(mine) == list(theirs)
    assert names == others
    assert mine.keys() - names.keys() == {name for name in mine if ".lora_" in name}
    assert all(torch.equal(mine[name], theirs[name]) for name in mine.keys() - names.keys())
    assert all(torch.equal(mine[name], before[origin.name]) for name, origin in names.items())
    assert all(theirs[name].is_meta for name in names)


def test_a_base_that_a_task_reads_by_itself_is_known_by_its_values() -> None:
    def digest(seed: int) -> str:
        torch.manual_seed(seed)
        base = base_of(config(), Problem(), adapted(BertModel(BERT)))
        assert base is not None
        return base.digest

    assert digest(0) == digest(0) != digest(1)


@pytest.mark.parametrize(
    ("model", "lora", "line"),
    [
        (
            lambda: Classifier(),
            {},
            r"is a Classifier, not one of transformers; train it without LoRA",
        ),
        (
            lambda: BertModel(BERT),
            {"targets": "quer"},
            r"'quer': matches no layer's whole name; .* such as encoder",
        ),
        (
            lambda: BertModel(BERT),
            {"targets": ["key", "ask"]},
            r"'ask' ends the name of no layer; names are such as",
        ),
        (
            lambda: BertForSequenceClassification(BERT),
            {"targets": "classifier"},
            r"'classifier' names no layer but classifier, which",
        ),
        (lambda: BertModel(BERT), {"targets": ["LayerNorm"]}, r"LayerNorm.*is not supported"),
    ],
)
def test_a_model_that_cannot_be_adapted_is_one_line(
    model: Any, lora: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        adapted(model(), **lora)
    assert "\n" not in str(refused.value)


def test_a_language_model_whose_files_have_no_head_is_refused(tmp_path: Path) -> None:
    BertModel(BERT).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"lacks cls\.predictions\.\S+ of a BertForMaskedLM, which would stay random",
    ):
        adapted(BertForMaskedLM(BERT), tmp_path)


REFUSED = {
    "--lora 0": "--lora '0': ",
    "--set lora.alpha=8": "lora.alpha = 8.0: does nothing without a rank; give --set lora.rank=8",
    "--lora 4 --set lora.dropout=1": "lora.dropout",
    "--lora 4 --set lora.targets=(": "lora.targets = '(': not a regular expression",
    "--lora 4 --set lora.targets=[]": "lora.targets = []: names no layer",
    "--lora 4 --set lora.targets=nothing": (
        "'nothing': matches no layer's whole name; names are such as bert."
    ),
    "--lora 4 --freeze embeddings": (
        "freeze = 'embeddings': matches no parameter's name that LoRA trains"
    ),
    "--lora 4 --freeze .": "freeze = '.': matches every parameter's name that LoRA trains",
    "--freeze embedings": (
        "freeze = 'embedings': matches no parameter's name; names are such as bert."
    ),
    "--task image-classification --model conv-tiny --lora 4": (
        "is a ConvNet, not one of transformers"
    ),
}
"""Flags, to what their error says."""


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import image_cases

    return image_cases.in_folders(tmp_path_factory.mktemp("images"), 24)


@pytest.mark.parametrize("flags", REFUSED)
@pytest.mark.needs("distcore-tasks")
def test_a_combination_that_cannot_work_is_refused_before_ranks_start(
    flags: str, work_folder: Path, image_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = image_folder if "image" in flags else "rows.json"
    model = "" if "--model" in flags else "--model bert-tiny --max-seq-len 8"
    assert (
        main(f"train --data {data} {model} --out run --strategy ddp --nproc 2 {flags}".split()) == 2
    )
    [*_, line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert REFUSED[flags] in line
    assert not (work_folder / "run").exists()


@pytest.mark.needs("distcore-tasks")
def test_the_dry_run_shows_alpha_filled_in(
    work_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--data rows.json --model bert-tiny --max-seq-len 8 --lora 4 --strategy fsdp --nproc 2"
        " --dry-run"
    )
    assert main(["train", *flags.split()]) == 0
    assert "lora:\n  rank: 4\n  alpha: 8.0\n" in capfd.readouterr().out


@pytest.mark.needs("distcore", "distcore-tasks")
def test_without_the_distribution_the_line_says_what_to_install(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = ["train", "--data", "rows.json", "--model", "bert-tiny", "--lora", "4", "--out", "run"]
    assert main(["-p", "no:lora", *job]) == 2
    assert "error: lora.rank = 4: adapter 'lora' is installed but blocked" in capfd.readouterr().err
    monkeypatch.setattr(registry, "all_offers", partial(_without, registry.all_offers, "lora"))
    assert main(job) == 2
    line = (
        "no adapter named 'lora' (installed: none). Install it with:"
        f" {how_to_get('adapters', 'lora')}"
    )
    assert line in capfd.readouterr().err
    assert not Path("run").exists()


def _without(
    all_offers: Callable[[str], list[EntryPoint]], name: str, group: str
) -> list[EntryPoint]:
    return [entry for entry in all_offers(group) if entry.name != name]

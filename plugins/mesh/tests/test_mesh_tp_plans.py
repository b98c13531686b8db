"""Which layers are split: plans, and what is refused in one line."""

import re
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from text_task import TEXTS
from torch import nn
from torch.distributed import ProcessGroup
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from work_folder import enter, write_rows

from distcore import ConfigError, RunConfig, StrategyError
from distcore.cli.main import main
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Classifier, Problem
from distcore_lora.adapter import inject
from distcore_mesh.experts import splits_of_experts
from distcore_mesh.parallel_group import ParallelGroup
from distcore_mesh.strategy import MeshStrategy
from distcore_mesh.tensor_layout import TensorSplit
from distcore_mesh.tensor_parallel import split_layers
from distcore_mesh.tp_plans import plan_for

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "intermediate_size": 24,
}


class Own(nn.Module):
    """Two blocks whose second layer belongs to the first, and a weight
    that two embeddings share.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6)) for _ in range(2)
        )
        self.first, self.second = nn.Embedding(6, 6), nn.Embedding(6, 6)
        self.second.weight = self.first.weight


def file(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return str(path)


def split(model, ranks, plan=None, rank=0):
    """Split ``model`` as one rank of ``ranks`` would; nothing is exchanged before it runs."""
    return split_layers(
        model, plan_for(model, plan), ParallelGroup(cast(ProcessGroup, None), rank, ranks)
    )[0]


def resolve_options(nproc=4, **options):
    lora = options.pop("lora", None)
    keys: dict[str, Any] = {"lora": {"rank": lora}} if lora else {}
    keys |= {
        "strategy": "mesh",
        "strategy_options": options,
        "nproc": nproc,
        "device": "cpu",
        "lr": 0.01,
    }
    resolve(RunConfig(out="never-made", **keys), task=Problem())


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (1, 4, 1)),
        ({"tp": 2}, (1, 2, 2)),
        ({"tp": 2, "replicate": 2}, (2, 1, 2)),
        ({"replicate": 2}, (2, 2, 1)),
        ({"shard": 1}, (4, 1, 1)),
        ({"shard": 2}, (2, 2, 1)),
        ({"tp": 2, "shard": 1}, (2, 1, 2)),
        ({"pp": 2, "tp": 2}, (1, 1, 2)),
    ],
)
def test_the_open_dimension_takes_the_remaining_ranks(options, sizes):
    assert MeshStrategy(**options).sizes(4) == (options.get("pp", 1), *sizes[:2], 1, sizes[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tp": 3},
            (
                r"--nproc 4: under strategy 'mesh' 3 ranks train on the same rows.*; use --nproc 3"
                r" or --nproc 6"
            ),
        ),
        (
            {"tp": 2, "shard": 3},
            r"tp = 2 \* shard = 3 does not make nproc = 4: a multiple of 6 would",
        ),
        (
            {"replicate": 2, "shard": 1},
            r"options: replicate = 2 \* shard = 1 does not make nproc = 4: 2 ranks would",
        ),
        ({"plan": "no.yaml"}, r"plan = 'no.yaml': cannot be read: .*No such file"),
        (
            {"tp": 2, "activation_checkpointing": "products"},
            r"= 'products': not with tp = 2: ranks sum products in pl",
        ),
        (
            {"cp": 2, "activation_checkpointing": True},
            r"checkpointing: not with cp = 2; use --set gradient_checkpoint",
        ),
        (
            {"tp": 2, "sequence_parallel": True, "lora": 4},
            r"lora.rank = 4: .* with sequence_parallel = false only$",
        ),
    ],
)
def test_sizes_that_cannot_be_are_one_line_before_a_rank_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        resolve_options(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "mesh:tp=4 --nproc 4",
            r"strategy_options.tp = 4: must divide num_attention_heads = 2 \(possible: 1, 2\)",
        ),
        (
            "mesh:cp=2 --nproc 2",
            r"strategy_options.cp = 2: BertForSequenceClassification .*is not known to compute",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_a_rank_starts(
    options, message, tmp_path, monkeypatch, capsys
):
    enter(tmp_path, monkeypatch)
    write_rows(tmp_path)
    words = (
        f"train --task {TEXTS} --data rows.json --device cpu --out run --strategy {options}".split()
    )
    assert main(words) == 2
    assert re.fullmatch(rf"error: {message}.*\n", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_schedule_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(
        StrategyError, match="pp_schedule = 'dual': expected '1f1b', 'gpipe' or 'interleaved'"
    ):
        resolve_options(pp=2, pp_schedule="dual")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- colwise", r"expected lines 'NAME: STYLE', such as"),
        (
            "a: colwize",
            (
                r"a: colwize: no such style \(did you mean 'colwise'\?\) \(styles: colwise,"
                r" qkv_colwise"
            ),
        ),
        ("a: [", r"cannot be read: while parsing"),
    ],
)
def test_a_plan_file_that_is_none_is_one_line(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        resolve_options(tp=2, plan=file(tmp_path, text))


def test_a_plan_without_anything_to_split_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is for tp greater than 1"):
        resolve_options(tp=1, plan=file(tmp_path, "a: colwise"))


def test_a_users_plan_splits_an_own_module(tmp_path):
    model = Own()
    whole = [p.detach().clone() for p in model.blocks[1].parameters()]
    plan = file(tmp_path, "blocks.*.0: colwise\nblocks.*.1: rowwise\n")
    assert len(split(model, 3, plan, rank=1)) == 6
    up, bias, down, last = model.blocks[1].parameters()
    assert torch.equal(up, whole[0][4:8])
    assert torch.equal(bias, whole[1][4:8])
    assert torch.equal(down, whole[2][:, 4:8])
    assert torch.equal(last, whole[3])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("blocks.*.3: colwise", r"the model has no 'blocks.\*.3'"),
        ("blocks: colwise", r"blocks is a ModuleList, which cannot be split 'colwise'"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(lines, message, tmp_path):
    with pytest.raises(StrategyError, match=message):
        split(Own(), 2, file(tmp_path, lines))


def test_a_shared_weight_is_split_for_all_that_use_it_or_for_none(tmp_path):
    one, both = (
        "first: embedding_rowwise\nblocks.*.0: colwise\n",
        "first: embedding_rowwise\nsecond: embedding_rowwise",
    )
    assert "first.weight" not in split(Own(), 2, file(tmp_path, one))
    model = Own()
    assert "first.weight" in split(model, 2, file(tmp_path, both))
    assert model.first.weight is model.second.weight
    assert model.first.weight.shape == (3, 6)
    with pytest.raises(
        StrategyError, match="'first' shares its weight with 'second', which is not split alike"
    ):
        split(Own(), 2, file(tmp_path, "first: embedding_colwise"))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_split_weight_with_a_hook_on_its_gradient_is_refused(register, tmp_path):
    """The hook would get a rank's part of the gradient; that of a weight that
    stays whole is kept.
    """
    model, plan = Own(), file(tmp_path, "blocks.*.0: colwise\nblocks.*.1: rowwise\n")
    getattr(model.first.weight, register)(lambda _: None)
    assert len(split(model, 2, plan)) == 6
    hooked = Own()
    getattr(hooked.get_parameter("blocks.1.0.weight"), register)(lambda _: None)
    with pytest.raises(
        StrategyError,
        match=r"'mesh': the gradient of 'blocks.1.0.weight' has a hook, .*as tp splits",
    ):
        split(hooked, 2, plan)


def test_a_model_without_a_plan_is_refused_with_what_to_add():
    message = (
        r"strategy 'mesh': Own has no plan for tp: give one by strategy_options.plan, .*it has "
        r"blocks.\*.0 \(6 to 12\), blocks.\*.1 \(12 to 6\) \(with a plan: bert, "
    )
    with pytest.raises(StrategyError, match=message):
        plan_for(Own(), None)
    with pytest.raises(
        StrategyError, match=r"AlbertModel \(model type 'albert'\) has no plan .*attention.query"
    ):
        plan_for(AlbertModel(AlbertConfig(**SMALL)), None)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "embed_tokens",
            (
                r"^lora.targets: model.embed_tokens has an adapter, which tp cannot split"
                r" 'embedding_rowwise'; "
            ),
        ),
        (
            "lm_head",
            (
                r"^strategy_options.loss_parallel: not with an adapter of the head, lm_head; leave"
                r" it out$"
            ),
        ),
    ],
)
def test_an_adapter_that_cannot_be_split_is_refused(target, message):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    config = RunConfig(lora={"rank": 2, "alpha": 4, "targets": [target]})
    inject(config, model, None)
    with pytest.raises(StrategyError, match=message):
        MeshStrategy(tp=2, loss_parallel=True).check_model(config, model)


def small_mixture(experts):
    config = MixtralConfig(**SMALL | {"num_key_value_heads": 2}, num_local_experts=experts)
    with torch.device("meta"):
        return MixtralForCausalLM(config)


def test_a_plan_with_styles_that_are_not_there_is_refused():
    model: Any = small_mixture(2)
    model._tp_plan = {"layers.*.self_attn": "shared_by_parity"}
    with pytest.raises(
        StrategyError, match=r"the plan of MixtralForCausalLM: .* which this strategy cannot do"
    ):
        plan_for(model, None)


def test_experts_are_left_out_of_a_plan_and_shared_whole():
    model = small_mixture(2)
    assert not any("experts" in name for name in plan_for(model, None).styles)
    assert set(splits_of_experts(model)) == {
        f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")
    }


@pytest.mark.parametrize(
    ("options", "experts", "message"),
    [
        ({"tp": 2}, 3, r"tp = 2: 2 ranks must divide the 3 experts of .* \(possible: 1, 3\)"),
        ({"ep": 2, "tp": 2}, 6, r"ep = 2: 4 ranks must divide the 6 experts of"),
    ],
)
def test_experts_that_ranks_do_not_divide_are_refused(options, experts, message):
    with pytest.raises(StrategyError, match=message):
        MeshStrategy(**options).check_model(RunConfig(nproc=4), small_mixture(experts))


def test_experts_that_are_not_stacked_expert_first_are_refused():
    model: Any = small_mixture(2)
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = torch.nn.Parameter(torch.empty(32, 2, 48, device="meta"))
    with pytest.raises(StrategyError, match=r"ep = 2: .*down_proj has the shape \(32, 2, 48\)"):
        MeshStrategy(ep=2).check_model(RunConfig(nproc=2), model)


def test_a_model_without_experts_is_refused():
    with torch.device("meta"):
        model = Classifier()
    with pytest.raises(StrategyError, match=r"ep = 2: Classifier has no stacked experts to share"):
        MeshStrategy(ep=2).check_model(RunConfig(nproc=2), model)


def test_experts_with_an_adapter_are_refused():
    model = small_mixture(2)
    inject(RunConfig(lora={"rank": 2, "alpha": 4}), model, None)
    with pytest.raises(StrategyError, match=r"lora.targets: .*experts.* name other layers"):
        MeshStrategy(ep=2).check_model(RunConfig(nproc=2), model)


def test_heads_that_do_not_divide_name_the_numbers_that_do():
    message = (
        r"strategy_options.tp = 4: must divide num_attention_heads = 6 \(possible: 1, 2, 3, 6\)"
    )
    with pytest.raises(StrategyError, match=message):
        split(BertModel(BertConfig(**SMALL)), 4)
    config = LlamaConfig(**SMALL, num_key_value_heads=2)
    with pytest.raises(
        StrategyError, match=r"tp = 3: must divide num_key_value_heads = 2 \(possible: 1, 2\)"
    ):
        split(LlamaForCausalLM(config), 3)


def test_tied_embeddings_stay_tied():
    config = LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    assert "model.embed_tokens.weight" in split(model, 2)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (30, 48)
    tied = BertForMaskedLM(BertConfig(**SMALL))
    split(tied, 2)
    assert tied.cls.predictions.decoder.weight is tied.bert.embeddings.word_embeddings.weight


@pytest.mark.parametrize(("dimension", "parts"), [(0, 1), (1, 1), (0, 3), (1, 3)])
@pytest.mark.parametrize("cuts", [(0, 12), (0, 5, 12), (0, 1, 7, 12)])
def test_the_boxes_of_all_ranks_make_the_whole_tensor_once(dimension, parts, cuts):
    whole, ranks = torch.arange(24 * 24).reshape(24, 24), 2
    layout, made = TensorSplit(dimension, parts, (24, 24)), torch.full((24, 24), -1)
    for rank in range(ranks):
        part = layout.part_of(whole, rank, ranks)
        scaled = [cut * len(part) // 12 for cut in cuts]
        for first, stop in pairwise(scaled):
            rows, at = part[first:stop], 0
            for box in layout.boxes(rank, ranks, first, stop - first):
                length = box[dimension].stop - box[dimension].start
                assert (made[box] == -1).all()
                made[box] = rows.narrow(dimension, at, length)
                at += length
            assert at == rows.shape[dimension]
    assert torch.equal(made, whole)

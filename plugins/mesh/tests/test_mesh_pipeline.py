"""A pipeline over a model's own code: loss, gradients and evaluation on two ranks are those
of the whole model.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from torch import nn

from distcore import MicroBatch, Run, RunConfig, StrategyError, launch
from distcore.testing.problem import Problem
from distcore.testing.rank import lab_of
from distcore.testing.subject import Subject
from distcore_mesh.pipeline import explain_changed_tensors
from distcore_mesh.strategy import MeshStrategy

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
ENCODER = SIZES | {"max_position_embeddings": 64, "num_labels": 3}
DECODER = SIZES | {
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = DECODER | {"num_key_value_heads": 2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: t.BertForSequenceClassification(t.BertConfig(**ENCODER)),
    "roberta": lambda: t.RobertaForSequenceClassification(t.RobertaConfig(**ENCODER)),
    "distilbert": lambda: t.DistilBertForSequenceClassification(
        t.DistilBertConfig(
            vocab_size=64, dim=32, n_layers=4, n_heads=4, hidden_dim=48, max_position_embeddings=64
        )
    ),
    "electra": lambda: t.ElectraForSequenceClassification(
        t.ElectraConfig(**ENCODER, embedding_size=32)
    ),
    "modernbert": lambda: t.ModernBertForSequenceClassification(
        t.ModernBertConfig(**DECODER, cls_token_id=1, sep_token_id=2)
    ),
    "gpt2": lambda: t.GPT2LMHeadModel(
        t.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=64, tie_word_embeddings=False
        )
    ),
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED)),
    "llama, 12 blocks": lambda: t.LlamaForCausalLM(
        t.LlamaConfig(**GROUPED | {"num_hidden_layers": 12})
    ),
    "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**GROUPED)),
    "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**GROUPED)),
    "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**GROUPED, head_dim=8)),
    "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**GROUPED)),
    "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**GROUPED, head_dim=8)),
    "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**DECODER)),
    "vit": lambda: t.ViTForImageClassification(
        t.ViTConfig(
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=8,
            patch_size=4,
        )
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"pp_schedule": "gpipe"},
    "interleaved": {"pp_schedule": "interleaved"},
    "3 chunks": {"pp_schedule": "interleaved", "pp_chunks": 3},
    "activation_checkpointing": {"activation_checkpointing": True},
    "interleaved, activation_checkpointing": {
        "pp_schedule": "interleaved",
        "activation_checkpointing": True,
    },
}
CASES = [
    *((name, options, 3) for name in MODELS for options in ("1f1b", "interleaved")),
    *(
        (name, options, 3)
        for name in ("bert", "llama")
        for options in OPTIONS
        if options != "3 chunks"
    ),
    *(("llama, 12 blocks", "3 chunks", micros) for micros in (1, 2, 3, 4, 7)),
]
"""Model, options, and number of micro-batches."""
LENGTHS = (6, 9, 5, 12, 4, 7, 8)
"""Of the micro-batches of a step."""


class OutOfOrder(nn.Module):
    """Registers the norm that it calls last before its blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)


def inputs_of(name, length):
    if name == "vit":
        return {"pixel_values": torch.linspace(-1, 1, length * 192).view(length, 3, 8, 8)}
    mask = torch.ones(3, length, dtype=torch.long)
    mask[0, length - 2 :] = 0
    return {"input_ids": torch.arange(3 * length).view(3, length) % 61 + 3, "attention_mask": mask}


def squares(model, _micro, batch):
    return model(**batch).logits.square().mean()


def rates_of(job):
    names = {id(parameter): name for name, parameter in job.run.module.named_parameters()}
    return {
        names[id(each)]: group["lr"]
        for group in job.run.optimizer.param_groups
        for each in group["params"]
    }


def part_only(model, _micro, batch):
    return model.model(**batch)[0].mean()


def twice(model, _micro, batch):
    return (model(**batch).logits + model(**batch).logits).mean()


def wrapped(lab, model, **options):
    strategy = MeshStrategy(pp=2, **options)
    run = Run(
        config=RunConfig(device="cpu"),
        world=lab.world,
        capabilities=strategy.capabilities,
        module=model,
        model=model,
    )
    prepared = strategy.wrap_model(
        run, model, lambda module: torch.optim.AdamW(module.parameters())
    )
    return strategy, replace(
        run, model=prepared.model, optimizer=prepared.optimizer, strategy_state=prepared.state
    )


def compared(lab, name, options, micros):
    """How far loss, gradients and outputs in evaluation are from the whole model's, and what
    part a stage holds.
    """
    torch.manual_seed(0)
    whole = MODELS[name]().eval()  # without dropout
    cut, calls = copy.deepcopy(whole), Counter[nn.Module]()
    blocks = max(([*each] for each in cut.modules() if isinstance(each, nn.ModuleList)), key=len)
    for block in blocks:
        block.register_forward_hook(lambda module, *_: calls.update([module]))
    strategy, run = wrapped(lab, cut, **OPTIONS[options])
    batches = [inputs_of(name, length) for length in LENGTHS[:micros]]
    last, rows = batches[-1], np.arange(3)
    loss = strategy.train_step(
        run, [(MicroBatch(indices=rows, last=batch is last), batch) for batch in batches], squares
    )
    expected = sum(squares(whole, None, batch) for batch in batches)
    expected.backward()
    gradients = {
        name: each.grad for name, each in whole.named_parameters() if each.grad is not None
    }
    mine = dict(run.module.named_parameters())
    unlike = max(
        float((parameter.grad - gradients[name]).norm() / (gradients[name].norm() + 1e-6))
        for name, parameter in mine.items()
    )
    with torch.no_grad():
        outputs = float((run.model(**last).logits - whole(**last).logits).abs().max())
    own = {calls[block] for block in blocks if next(block.parameters(), None) in {*mine.values()}}
    # once to see what it returns, where it is absent in some passes
    assert own == {micros + 1 + (strategy.chunks > 1)}
    lab.share(0)  # what was sent must have arrived before this stage is forgotten
    make_stage_optimizer = {
        id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]
    }
    assert make_stage_optimizer == {id(parameter) for parameter in mine.values()}
    return (
        float(loss),
        float(expected.detach()),
        unlike,
        outputs,
        frozenset(mine),
        frozenset(gradients),
    )


def averaged(lab):
    """Losses with averaged weights, in training, and with the weights as they are:
    in stages, and whole.
    """
    losses = []
    for make in (lab.job, lab.build_alone):
        job = make(Problem(), ema={"decay": 0.5})
        trained = job.train(3)
        without = replace(job, training=replace(job.training, run=replace(job.run, ema=None)))
        losses.append(
            (job.evaluate().metrics["loss"], trained.losses[-1], without.evaluate().metrics["loss"])
        )
    return losses


def in_a_rank(folder):
    subject = Subject(
        config=RunConfig(strategy="mesh", strategy_options={"pp": 2}, nproc=2, device="cpu"),
        cases=(),
    )
    with lab_of(subject, folder) as lab:
        by_case = {case: compared(lab, *case) for case in dict.fromkeys(CASES)}
        seeds = lab.share(torch.initial_seed())
        rates = [
            rates_of(make(Problem(), optimizer={"layer_decay": 0.5}))
            for make in (lab.job, lab.build_alone)
        ]
        averages_of_both = averaged(lab)
        _, run = wrapped(lab, OutOfOrder())
        with pytest.raises(StrategyError) as misplaced:
            run.model(torch.ones(2, 4))
        _, run = wrapped(lab, MODELS["llama"]())
        with pytest.raises(StrategyError) as generates:
            run.module.generate(torch.ones(1, 3, dtype=torch.long))
        strategy, run = wrapped(lab, MODELS["llama"]())
        with torch.no_grad():  # once as a task should, since stages compare their first calls
            run.model(**inputs_of("llama", 4))
        loss = part_only if lab.world.rank == 0 else twice
        with pytest.raises(StrategyError) as calls:
            strategy.train_step(
                run, [(MicroBatch(indices=np.arange(3)), inputs_of("llama", 4))], loss
            )
    return (
        by_case,
        (seeds, rates, averages_of_both),
        str(misplaced.value),
        str(generates.value),
        str(calls.value),
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch(in_a_rank, tmp_path_factory.mktemp("pipeline"), nproc=2)


@pytest.mark.ranks
@pytest.mark.parametrize("case", list(dict.fromkeys(CASES)))
def test_two_ranks_compute_what_the_whole_model_does(case, ranks):
    (
        (loss_of_first, _, first, _, held_by_first, _),
        (loss, expected, second, outputs, held, whole),
    ) = (by_case[case] for by_case, *_ in ranks)
    assert loss_of_first == 0.0
    assert loss == pytest.approx(expected, rel=1e-6)
    assert max(first, second) < 1e-6
    assert outputs < 1e-6
    assert held | held_by_first == whole
    assert not held & held_by_first


@pytest.mark.ranks
def test_stages_draw_other_masks_than_each_other(ranks):
    for _, (seeds, *_), *_ in ranks:
        assert seeds[0] != seeds[1]  # of the last step; both were seeded alike


@pytest.mark.ranks
def test_learning_rates_are_those_of_the_whole_model(ranks):
    for _, (_, (mine, whole), _), *_ in ranks:
        assert mine.items() < whole.items()
        assert len(set(whole.values())) > 2


@pytest.mark.ranks
def test_averaged_weights_take_the_place_of_those_of_each_stage(ranks):
    for _, (*_, (mine, whole)), *_ in ranks:
        assert mine == pytest.approx(whole, abs=1e-6)
        assert whole[0] != whole[2]


@pytest.mark.ranks
def test_a_module_in_the_wrong_stage_is_named_when_it_is_called(ranks):
    for _, _, line, *_ in ranks:
        assert (
            line
            == "strategy 'mesh': with pp norm is in the wrong stage: the model calls it after the"
            " blocks"
        )


@pytest.mark.ranks
def test_generating_is_refused(ranks):
    for *_, line, _ in ranks:
        assert line == "strategy 'mesh': with pp greater than 1 a model cannot generate; use pp = 1"


@pytest.mark.ranks
def test_a_loss_that_calls_the_model_otherwise_than_once_is_refused(ranks):
    (*_, first), (*_, last) = ranks
    assert first == "strategy 'mesh': with pp a task's loss must call model(...); use pp = 1"
    assert last == "strategy 'mesh': with pp a task's loss can call the model once; use pp = 1"


def test_a_weight_that_forward_writes_between_passes_is_named() -> None:
    """As a layer that clamps its weight does, in the forward pass of the next micro-batch."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    loss = model(torch.ones(1, 2)).sum()
    with torch.no_grad():
        dict(model.named_parameters())["1.weight"].clamp_(-0.1, 0.1)
    shape_and_name = r"to a tensor of shape \[3, 4\], such as the weight '1\.weight', which"
    with (
        pytest.raises(StrategyError, match=shape_and_name) as refused,
        explain_changed_tensors(model),
    ):
        loss.backward()
    assert str(refused.value).endswith("write to no weight in forward, or use pp = 1")


def test_other_errors_of_a_backward_pass_stay_as_they_are() -> None:
    with (
        pytest.raises(RuntimeError, match="does not require grad"),
        explain_changed_tensors(nn.Linear(1, 1)),
    ):
        torch.ones(()).backward()

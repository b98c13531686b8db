"""A model without a valid split into pipeline stages is refused in one line,
before a rank starts.
"""

from functools import partial

import pytest
import torch
import transformers as t
from torch import nn

from distcore import ConfigError, RunConfig, StrategyError
from distcore.testing import STRATEGIES
from distcore_mesh.pipeline_split import check_stages
from distcore_mesh.placeholders import StagePlaceholder
from distcore_mesh.strategy import MeshStrategy

INTERLEAVED = {"pp_schedule": "interleaved"}


def blocks(number):
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(number)))


def with_statistics():
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))


class Counts(nn.Linear):
    """A layer with extra state."""

    def get_extra_state(self):
        return {"passes": 0}


def with_extra_state():
    return nn.ModuleDict({"blocks": blocks(2), "head": Counts(4, 4)})


def with_own_weight():
    model = nn.Module()
    model.scale, model.blocks = nn.Parameter(torch.ones(1)), blocks(2)
    return model


def tied():
    model = nn.Module()
    model.first, model.blocks, model.last = nn.Linear(4, 4), blocks(2), nn.Linear(4, 4)
    model.last.weight = model.first.weight
    return model


SMALL_T5 = t.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)


@pytest.mark.parametrize(
    ("make", "pp", "line"),
    [
        (partial(blocks, 6), 4, r"must divide the model's 6 blocks \(possible: 1, 2, 3, 6\)"),
        (
            tied,
            2,
            (
                r"first.weight and last.weight are one weight, which two stages cannot share; untie"
                r" them"
            ),
        ),
        (with_own_weight, 2, r"'scale' of Module is in no stage"),
        (
            with_statistics,
            2,
            r"0.1.running_mean is a running statistic of a block, which other stages cannot see",
        ),
        (
            with_extra_state,
            2,
            r"head._extra_state is state of a layer of one stage, which a checkpoint would miss",
        ),
        (
            partial(nn.Linear, 4, 4),
            2,
            r"needs a model with one list of repeated blocks; Linear has: none",
        ),
        (
            partial(t.T5ForConditionalGeneration, SMALL_T5),
            2,
            r"needs a model with one list .* has: encoder.block, decoder.block",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_a_remedy(make, pp, line):
    with torch.device("meta"):
        model = make()
    with pytest.raises(StrategyError, match=rf"^strategy_options.pp = {pp}: {line}"):
        check_stages(model, pp)


def test_a_part_of_a_block_of_another_stage_is_refused_to_whoever_reads_it():
    block = nn.Sequential(nn.Linear(4, 4))
    vars(block)["kind"] = "plain"
    away = StagePlaceholder(block, lambda hidden, _: hidden)
    assert away.kind == "plain"
    assert not hasattr(away, "attention_type")
    with pytest.raises(
        StrategyError, match="with pp 'up' of a block is on the ranks of another stage alone"
    ):
        _ = away.up


def test_several_stages_on_each_rank_divide_the_blocks_together():
    check_stages(blocks(12), pp=2, chunks=3)
    line = (
        r"^strategy_options.pp = 2: pp \* pp_chunks = 4 must divide the model's 6 blocks"
        r" \(possible: 1, 2, 3, 6\)$"
    )
    with pytest.raises(StrategyError, match=line):
        check_stages(blocks(6), pp=2, chunks=2)


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"pp": 2}, 2),
        ({"pp": 2} | INTERLEAVED, 4),
        ({"pp": 2, "pp_chunks": 3} | INTERLEAVED, 6),
    ],
)
def test_laws_are_measured_with_as_many_blocks_as_the_stages_take(options, blocks):
    assert STRATEGIES.subject("mesh", 2, options).shape.blocks == blocks


@pytest.mark.parametrize(
    ("options", "changes", "line"),
    [
        (
            {"pp": 2, "cp": 2},
            {"nproc": 4},
            r"^strategy_options.pp = 2: not with cp = 2; choose one of them$",
        ),
        (
            {"pp": 2},
            {"nproc": 2, "lora": {"rank": 4}},
            r"^lora.rank = 4: .* trains adapters with pp = 1 only$",
        ),
        (
            {"pp": 2},
            {"nproc": 3},
            r"^strategy_options: pp = 2 does not make nproc = 3: a multiple of 2 would$",
        ),
        (
            {"ep": 2, "tp": 2},
            {"nproc": 2},
            r"^strategy_options.ep = 2: must divide shard = 1 \(possible: 1\)$",
        ),
        (
            INTERLEAVED,
            {"nproc": 2},
            r"^strategy_options.pp_schedule = 'interleaved': needs pp greater than 1$",
        ),
        (
            {"pp_schedule": "gpipe"},
            {"nproc": 2},
            r"^strategy_options.pp_schedule = 'gpipe': needs pp greater than 1$",
        ),
        (
            {"activation_checkpointing": True},
            {"nproc": 2, "gradient_checkpointing": True},
            r"activation_checkpointing: has no effect with gradient_checkpointing = true",
        ),
        (
            {"pp": 2, "pp_chunks": 2},
            {"nproc": 2},
            r"^strategy_options.pp_chunks = 2: is for pp_schedule = 'interleaved'$",
        ),
    ],
)
def test_options_that_exclude_each_other_are_one_line(options, changes, line):
    with pytest.raises(ConfigError, match=line):
        MeshStrategy(**options).check_config(RunConfig(strategy="mesh", **changes))


def test_a_plan_does_not_trace_a_pipeline():
    with pytest.raises(
        StrategyError, match=r"^strategy_options.pp = 2: a pipeline is not traced; plan without pp$"
    ):
        MeshStrategy(pp=2).traced()


def test_a_strategy_without_stages_leaves_the_passes_to_the_loop():
    assert not hasattr(MeshStrategy(tp=2), "train_step")
    assert hasattr(MeshStrategy(pp=2), "train_step")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"cp": 2},
            r"strategy_options.cp = 2: Classifier is not known to compute parts of sequences",
        ),
        (
            {"pp": 5},
            r"strategy_options.pp = 5: must divide the model's 2 blocks \(possible: 1, 2\)",
        ),
    ],
)
def test_laws_that_the_kits_model_cannot_show_are_one_line(options, line):
    with pytest.raises(StrategyError, match=f"^the model with which the laws are measured: {line}"):
        STRATEGIES.subject("mesh", 10, options)

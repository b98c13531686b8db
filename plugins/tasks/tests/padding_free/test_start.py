"""When a run is padding-free: chosen by lengths, compared with padded rows before the first step,
said in one line.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from evaluated import evaluate_checkpoint

from distcore import Capabilities, ConfigError, Report, RunConfig, load_config, train
from distcore.jobs.evaluate import config_for
from distcore.plugin.task.datasets import own_padding
from distcore.resolve import tasks
from distcore.resolve.padding_free import choose_padding_free
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Problem
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.padding_free.token_sequence import TokenSequence

ONE = Capabilities(spec_version=3, processes="one")
SIZES = (2, 3, 4, 30, 40)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Texts of two classes, some of them ten times as long as others."""
    file = tmp_path / "rows.jsonl"
    texts = [" ".join(["good", "bad"][i % 2] for _ in range(SIZES[i % 5])) for i in range(60)]
    lines = [{"text": text, "copy": text, "label": i % 2} for i, text in enumerate(texts)]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


def config(rows: Path, **changes: Any) -> RunConfig:
    given: dict[str, Any] = {
        "data": str(rows),
        "model": "bert-tiny",
        "device": "cpu",
        "dropout": 0.0,
        "max_steps": 3,
        "log_every": 1,
        "global_batch_size": 12,
        "tokenizer": {"vocab_size": 64},
        "extensions": {"progress": False},
    }
    return RunConfig(**given | changes)


def run(rows: Path, name: str, **changes: Any) -> Report:
    return train(config(rows, out=str(rows.parent / name), **changes))


def losses(rows: Path, name: str) -> list[float]:
    lines = map(json.loads, (rows.parent / name / "metrics.jsonl").read_text().splitlines())
    return [
        value
        for line in lines
        for key, value in line.items()
        if key in ("train/loss", "train/grad_norm")
    ]


@pytest.mark.programs
def test_encoder_and_decoder_are_padding_free_where_it_gains_and_compute_the_same(
    rows: Path,
) -> None:
    pairs = {
        "task": "seq2seq",
        "model": "t5-tiny",
        "columns": {"source": "text", "target": "copy"},
        "dropout": 0.1,
        "dropout_masks": "row",
        "tokenizer": {"vocab_size": 300},
    }
    assert run(rows, "auto", **pairs)["padding_free"]["on"]
    run(rows, "padded", padding_free="off", **pairs)
    assert losses(rows, "auto") == pytest.approx(losses(rows, "padded"), rel=1e-5)


@pytest.mark.programs
def test_a_run_is_padding_free_where_it_gains_and_computes_the_same(
    rows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "distcore"):
        report = run(rows, "auto")
    [line] = [
        record.message for record in caplog.records if record.message.startswith("padding-free:")
    ]
    assert line.startswith("padding-free: on: spares ")
    assert "losses of 6 rows differ by " in line
    assert report["padding_free"]["on"]
    assert report["padding_free"]["why"].startswith("spares ")
    assert report["padding_free"]["difference"] < 1e-6
    assert yaml.safe_load((rows.parent / "auto/config.yaml").read_text())["padding_free"] == "on"
    off = run(rows, "off", padding_free="off")
    assert off["padding_free"] == {"on": False, "why": "", "difference": None}
    assert losses(rows, "auto") == pytest.approx(losses(rows, "off"), rel=1e-5)
    assert report["evaluation"]["loss"] == pytest.approx(off["evaluation"]["loss"], rel=1e-5)
    path = rows.parent / "auto/checkpoints/step-00000003"
    evaluated = evaluate_checkpoint(config_for(path, 1, {}), path)
    assert evaluated["evaluation"]["loss"] == pytest.approx(off["evaluation"]["loss"], rel=1e-5)


@pytest.mark.programs  # as long as one
def test_a_resumed_run_is_the_same_bit_for_bit(rows: Path) -> None:
    run(rows, "whole", save_every=1)
    run(rows, "part", save_every=1, max_steps=3)
    for step in (2, 3):
        for file in sorted(
            (rows.parent / f"part/checkpoints/step-0000000{step}").rglob("*"), reverse=True
        ):
            file.unlink() if file.is_file() else file.rmdir()
        (rows.parent / f"part/checkpoints/step-0000000{step}").rmdir()
    run(rows, "part", save_every=1, resume="auto")
    assert losses(rows, "part") == losses(rows, "whole")


@pytest.mark.ranks
def test_ranks_compute_the_same_losses_without_padding(rows: Path) -> None:
    run(rows, "one", padding_free="off")
    assert run(rows, "two", nproc=2, strategy="ddp")["padding_free"]["on"]
    assert losses(rows, "two") == pytest.approx(losses(rows, "one"), rel=1e-5)


def test_a_broken_pooling_is_found_before_the_first_step(
    rows: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TokenSequence.by_row
    monkeypatch.setattr(
        TokenSequence, "by_row", lambda self, firsts: right(self, firsts).roll(1, 0)
    )
    with pytest.raises(
        ConfigError,
        match=r"^padding_free = 'on': losses of 6 rows differ by .* \(bound: 1e-06\); use",
    ):
        run(rows, "on", padding_free="on")
    with caplog.at_level(logging.INFO, "distcore"):
        report = run(rows, "auto")
    assert "padding-free: off: losses of 6 rows differ by" in caplog.text
    assert not report["padding_free"]["on"]
    assert report["padding_free"]["difference"] > 1e-5
    assert yaml.safe_load((rows.parent / "auto/config.yaml").read_text())["padding_free"] == "off"
    monkeypatch.undo()
    run(rows, "off", padding_free="off")
    assert losses(rows, "auto") == losses(rows, "off")


@pytest.mark.slow
def test_a_run_by_a_real_compiler_is_padding_free_and_has_the_losses_of_an_eager_one(
    rows: Path,
) -> None:
    report = run(rows, "compiled", compile="regions")
    assert report["padding_free"]["on"]
    assert (
        yaml.safe_load((rows.parent / "compiled/config.yaml").read_text())["padding_free"] == "on"
    )
    run(rows, "eager")
    assert losses(rows, "compiled") == pytest.approx(losses(rows, "eager"), rel=1e-5)
    assert report["compile"]["compilations"] > 0


def chosen(given: RunConfig, declared: Capabilities = ONE) -> tuple[str, str]:
    given = resolve(given).config
    task = tasks.load_task(given)
    settled, choice = choose_padding_free(given, declared, task, task.prepare(given))
    return settled.padding_free, choice.why


def test_a_model_that_is_unknown_or_gains_nothing_is_padded(rows: Path) -> None:
    assert chosen(config(rows))[0] == "on"
    assert chosen(config(rows, padding_free="off")) == ("off", "")
    # of 12 layers little is left out in the last one
    padded = {"model": "bert-base", "max_seq_len": 4}
    assert chosen(config(rows, **padded)) == ("off", "it would save too little")
    assert chosen(config(rows, max_seq_len=4))[0] == "on"
    shared = Capabilities(spec_version=3, ranks_per_shard=2)
    assert chosen(config(rows), shared) == (
        "off",
        "strategy 'single' computes a row on several ranks",
    )
    elsewhere = resolve(config(rows)).config.model_copy(update={"device": "cuda"})
    task = tasks.load_task(elsewhere)
    assert choose_padding_free(elsewhere, ONE, task, task.prepare(elsewhere))[1].why.startswith(
        "not measured on cuda"
    )


def test_a_run_that_cannot_be_padding_free_is_refused_in_one_line(rows: Path) -> None:
    on = resolve(config(rows, padding_free="on")).config.model_copy(update={"compile": "on"})
    task = tasks.load_task(on)
    with pytest.raises(
        ConfigError,
        match=r"^padding_free = 'on': with compile = 'on' each step would be compiled anew, ",
    ):
        choose_padding_free(on, ONE, task, task.prepare(on))
    own = RunConfig(padding_free="on", task="object:Problem")
    with pytest.raises(
        ConfigError,
        match=r"^padding_free = 'on': task 'object:Problem' has no form without padding",
    ):
        choose_padding_free(own, ONE, Problem(), Problem().prepare(own))


@pytest.mark.filterwarnings("ignore:config key .packing. is deprecated")
def test_yaml_reads_on_and_off_and_the_key_of_earlier_versions(rows: Path) -> None:
    assert RunConfig(padding_free=True).padding_free == "on"
    before = load_config(None, {"task": "causal-lm", "packing": False, "model": "gpt2-tiny"})
    assert (before.padding_free, before.task_options) == ("off", {"model": "gpt2-tiny"})
    file = rows.parent / "before.yaml"
    file.write_text("packing: on\n")
    assert load_config(str(file), {}).padding_free == "on"
    assert load_config(str(file), {"packing": "off"}).padding_free == "off"
    assert load_config(str(file), {"padding_free": "auto"}).padding_free == "auto"


def test_a_language_model_packs_as_its_option_says(rows: Path) -> None:
    config, off, on = (
        RunConfig(task="causal-lm"),
        *(CausalLM(data=str(rows), packing=how) for how in ("off", "on")),
    )
    padded, packed = off.prepare(config), on.prepare(config)
    assert [own_padding(data.train) for data in (padded, packed)] == [True, False]
    assert choose_padding_free(config, ONE, off, padded)[0].padding_free == "off"
    assert choose_padding_free(config, ONE, on, packed)[0].padding_free == "on"
    assert own_padding(on.prepare(RunConfig(padding_free="off")).train)
    with pytest.raises(
        ConfigError,
        match=r"^padding_free = 'on': task_options.packing = 'off' pads rows; leave one",
    ):
        off.prepare(RunConfig(padding_free="on"))


@pytest.mark.programs
def test_the_rows_that_are_compared_leave_the_random_state_alone(rows: Path) -> None:
    torch.manual_seed(3)
    run(rows, "dropout", dropout=0.1, padding_free="on")
    run(rows, "again", dropout=0.1, padding_free="on")
    assert losses(rows, "dropout") == losses(rows, "again")

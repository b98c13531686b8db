"""Data that a task may give and get: nested batches, ragged rows, sums, data that
vary; and those refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from distcore import Datasets, Ragged, RunConfig, Simple, launch, row_random, train
from distcore.checkpoint import read_tensors
from distcore.engine.collation import difference
from distcore.engine.loader import each_tensor
from distcore.engine.trainer import set_up, train_in
from distcore.errors import TaskError
from distcore.rank_environment import join
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Classifier, Problem, RandomRows
from distcore.testing.reference import largest_difference

pytestmark = pytest.mark.programs  # its runs are whole ones


def config(out: Path, **changes: Any) -> RunConfig:
    given = {
        "out": str(out),
        "max_steps": 3,
        "global_batch_size": 8,
        "lr": 0.01,
        "device": "cpu",
        "log_every": 1,
    }
    return RunConfig.model_validate(
        given | {"extensions": {"progress": False}, "micro_batch_size": 4} | changes
    )


def steps_in(out: Path) -> int:
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def evaluation_of(out: Path, task: Any, **changes: Any) -> dict[str, Any]:
    evaluation: dict[str, Any] = train(config(out, **changes), task)["evaluation"]
    return evaluation


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The evaluation of the laws' problem after three steps."""
    return evaluation_of(tmp_path_factory.mktemp("plain") / "run", Problem())


def test_a_ragged_gives_its_rows_one_by_one_and_in_any_order() -> None:
    ragged = Ragged(torch.arange(6), torch.tensor([2, 0, 3, 1]))
    assert [row.tolist() for row in ragged] == [[0, 1], [], [2, 3, 4], [5]]
    assert (len(ragged), ragged[-1].tolist()) == (4, [5])
    taken = ragged.take(torch.tensor([3, 2, 1, 3]))
    assert [row.tolist() for row in taken] == [[5], [2, 3, 4], [], [5]]
    assert ragged.take(torch.empty(0, dtype=torch.long)).values.shape == (0,)
    with pytest.raises(IndexError):
        ragged[4]


class Pair(NamedTuple):
    tokens: Tensor
    labels: Tensor


def test_every_tensor_of_a_nested_batch_is_moved_and_all_else_stays_what_it_is() -> None:
    batch = {"pair": Pair(torch.ones(1), torch.ones(2)), "rest": [(torch.ones(3), "text"), None, 4]}
    moved = each_tensor(batch, lambda tensor: tensor + 1)
    assert isinstance(moved["pair"], Pair)
    assert (
        difference(
            moved,
            {
                "pair": Pair(torch.full((1,), 2.0), torch.full((2,), 2.0)),
                "rest": [(torch.full((3,), 2.0), "text"), None, 4],
            },
        )
        is None
    )
    assert type(moved["rest"][0]) is tuple
    encoding = transformers.BatchEncoding({"input_ids": torch.ones(1)})
    assert isinstance(each_tensor(encoding, lambda tensor: tensor + 1), transformers.BatchEncoding)
    assert encoding["input_ids"].tolist() == [1]


@pytest.mark.parametrize(
    ("other", "place"),
    [
        ({"a": [torch.tensor([1.0, torch.nan]), 2], "b": np.arange(3)}, None),
        ({"a": [torch.tensor([1.0, 0.0]), 2], "b": np.arange(3)}, "batch['a'][0]"),
        ({"a": [torch.tensor([1.0, torch.nan]), 3], "b": np.arange(3)}, "batch['a'][1]"),
        ({"a": [torch.tensor([1.0, torch.nan]), 2], "b": np.ones(3)}, "batch['b']"),
        ({"a": [torch.tensor([1.0, torch.nan]).double(), 2], "b": np.arange(3)}, "batch['a'][0]"),
        ({"a": [torch.tensor([1.0, torch.nan]), 2]}, "batch"),
    ],
)
def test_a_difference_between_batches_is_found_by_its_place(
    other: object, place: str | None
) -> None:
    assert difference({"a": [torch.tensor([1.0, torch.nan]), 2], "b": np.arange(3)}, other) == place


class Nested(RandomRows):
    """The laws' rows, in a batch that is no dict of tensors."""

    def batch(self, indices: np.ndarray) -> Any:
        given = super().batch(indices)
        return (
            Pair(given["tokens"], given["labels"]),
            [{"items": given["items"]}, "note"],
            np.arange(2),
        )


@dataclass(frozen=True, kw_only=True)
class OnNested(Problem):
    def prepare(self, config: RunConfig) -> Datasets:
        evaluation = Nested(self.evaluation_rows, seed=1)
        return Datasets(train=Nested(self.rows), evaluation=evaluation, test=evaluation)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, self.flat(batch))

    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return super().outputs(model, self.flat(batch))

    def flat(self, batch: Any) -> dict[str, Tensor]:
        pair, rest, array = batch
        assert isinstance(batch, tuple)  # as it was, not a list that a loader process made of it
        assert isinstance(pair, Pair)
        assert isinstance(array, np.ndarray)
        return {"tokens": pair.tokens, "labels": pair.labels, "items": rest[0]["items"]}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_nested_batch_trains_as_a_flat_one(
    workers: int, tmp_path: Path, plain: dict[str, Any]
) -> None:
    assert evaluation_of(tmp_path / "run", OnNested(), loader={"workers": workers}) == plain


class Short:
    """The laws' problem with nothing but a loss per row: all that a task needs."""

    def prepare(self, config: RunConfig) -> Datasets:
        return Problem(weighted=True).prepare(config)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return Classifier()

    def row_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return batch["items"] * F.cross_entropy(
            model(batch["tokens"]), batch["labels"], reduction="none"
        )


def test_a_loss_per_row_is_a_whole_task(tmp_path: Path) -> None:
    wanted = evaluation_of(tmp_path / "whole", Problem(weighted=True))
    evaluation = evaluation_of(tmp_path / "short", Short())
    assert evaluation == {
        key: wanted[key] for key in ("loss", "evaluated", "unique", "dataset_size")
    }
    assert not (tmp_path / "short/predictions.jsonl").exists()
    assert (tmp_path / "whole/predictions.jsonl").exists()


class ByItems(Short):
    def prepare(self, config: RunConfig) -> Datasets:
        data = super().prepare(config)
        return replace(data, evaluation=data.train, test=data.train)


def test_the_mean_of_row_losses_is_over_items_as_in_training(tmp_path: Path) -> None:
    kept = tmp_path / "run"
    evaluation = evaluation_of(kept, ByItems())
    rows: Any = ByItems().prepare(config(kept)).train
    model = Classifier()
    saved = read_tensors(kept / "checkpoints/step-00000003")
    model.load_state_dict(
        {name: torch.as_tensor(saved[f"model/{name}"]) for name in model.state_dict()}
    )
    losses = Short().row_loss(model.eval(), rows.batch(np.arange(len(rows))))
    assert evaluation["loss"] == pytest.approx(losses.sum().item() / rows.items.sum(), rel=1e-5)


class Lacks(Short):
    row_loss: Any = None


class NoEvaluation(Lacks):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return Short.row_loss(self, model, batch).sum()


class NoReport(Short):
    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"label": batch["labels"]}


class PerBatch(Short):
    def row_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().row_loss(model, batch).mean()


class Reports(Problem):
    """Reports what a subclass wants."""

    answer: Any = None

    def report(self, outputs: dict[str, Tensor], data: Datasets) -> Any:
        return self.answer


class Detached(PerBatch):
    def row_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.zeros(len(batch["labels"]))


class Misses(Short):
    """A row is missing in training alone."""

    def row_loss(self, model: nn.Module, batch: Any) -> Tensor:
        losses = super().row_loss(model, batch)
        return losses[:-1] if torch.is_grad_enabled() else losses


class NoDict(Reports):
    answer = 0.5


class NoJSON(Reports):
    answer = {"loss": 0.5, "matrix": torch.ones(2, 2)}


class Undeclared(Reports):
    metrics = {"loss": "min", "f1": "max"}
    answer = {"loss": 0.5}


class NoObjects(Problem):
    def predictions(self, outputs: dict[str, Tensor], data: Datasets) -> Any:
        return ["a line"]


class NoJSONLines(Problem):
    def predictions(
        self, outputs: dict[str, Tensor], data: Datasets
    ) -> Iterable[dict[str, object]]:
        yield {"index": 0, "prediction": outputs["prediction"][0]}


class OddReopen(Problem):
    def reopen(self, folder: Path, config: RunConfig) -> Any:
        return {"classes": 4}


class Twice(Problem):
    def generate(self, model: nn.Module, batch: Any, in_step: bool) -> dict[str, Tensor]:
        return {"label": batch["labels"]}


class TwiceInSums(Problem):
    def sums(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"rows": torch.tensor(len(batch["labels"]))}

    def report_sums(self, sums: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        return {"loss": sums["rows"]}


class Widths(Problem):
    def sums(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"tokens": batch["tokens"].sum(0)}

    def report_sums(self, sums: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        return {}


class Index(Problem):
    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return super().outputs(model, batch) | {"index": batch["labels"]}


class WrongLengths(Problem):
    def outputs(self, model: nn.Module, batch: Any) -> Any:
        lengths = (batch["tokens"] != 0).sum(1)
        return super().outputs(model, batch) | {
            "tokens": Ragged(batch["tokens"].flatten()[1:], lengths * 0 + 1)
        }


class FewLengths(Problem):
    def outputs(self, model: nn.Module, batch: Any) -> Any:
        return super().outputs(model, batch) | {
            "tokens": Ragged(batch["tokens"][0], torch.tensor([2]))
        }


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Streams(Problem):
    def prepare(self, config: RunConfig) -> Any:
        # the mistake
        return replace(super().prepare(config), train=Stream())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Lacks(), "task Lacks: has neither loss() nor row_loss()"),
        (NoEvaluation(), "task NoEvaluation: has none of outputs(), sums() and row_loss()"),
        (NoReport(), "task NoReport: has outputs but no report()"),
        (
            PerBatch(),
            "task PerBatch: row_loss() returned a tensor of shape (); expected one loss per row",
        ),
        (Detached(), "task Detached: row_loss() returned losses without a gradient"),
        (Misses(), "task Misses: row_loss() returned 3 losses for 4 rows"),
        (NoDict(), "report() returned float; expected a dict of metrics"),
        (NoJSON(), "report() as 'matrix' returned Tensor; expected a JSON value"),
        (Undeclared(), "the report lacks 'f1', which `metrics` declares; it has ['loss']"),
        (NoObjects(), "predictions() gave str as a line; expected a dict"),
        (NoJSONLines(), "predictions() gave a line that is not JSON"),
        (OddReopen(), "reopen() returned dict; expected distcore.Datasets or None"),
        (Twice(), "generate() returned 'label', which outputs() has, too"),
        (TwiceInSums(), "report_sums() returned 'loss', which report() has, too"),
        (Index(), "outputs() returned 'index', which is the name of the row numbers"),
        (WrongLengths(), "outputs() returned 'tokens' with 47 values for lengths that sum up to 4"),
        (
            FewLengths(),
            "outputs() returned 'tokens' with lengths of shape (1,) and torch.int64 for 4 rows",
        ),
        (Streams(), "prepare() returned as 'train' a Stream, which is read from its start only"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_task_that_breaks_its_contract_fails_before_the_first_step(
    task: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=re.escape(message)) as refused:
        train(config(tmp_path / "run"), task)
    assert "\n" not in str(refused.value)
    assert not steps_in(tmp_path / "run")


def test_sums_of_other_shapes_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"sums\(\) returned 'tokens' of shapes \(\d+,\) and \(\d+,\)"
    ):
        train(config(tmp_path / "run"), Widths(evaluation_rows=30))


class Aligned(Problem):
    """A report that goes through data and outputs side by side, as its contract allows."""

    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        rows: Any = data.evaluation
        assert len(rows.labels) == len(outputs["label"])
        return super().report(outputs, data)


def test_a_report_finds_one_output_for_each_row_before_the_first_step_too(tmp_path: Path) -> None:
    assert evaluation_of(tmp_path / "run", Aligned(evaluation_rows=30))["evaluated"] == 30


class Masked(RandomRows):
    """Rows of which a third of the tokens is masked, others in each epoch; ``longer``: the
    first row grows, too.
    """

    def __init__(self, rows: int, epoch: int = -1, longer: bool = False) -> None:
        super().__init__(rows)
        self.rows, self.epoch, self.longer = rows, epoch, longer
        self.seen: list[int] = []
        if longer and epoch > 0:
            self.lengths = self.lengths + np.eye(1, rows, dtype=np.int64)[0]
        if epoch >= 0:
            self.items = self.items + epoch  # may differ between epochs, unlike lengths

    def at(self, epoch: int) -> Masked:
        self.seen.append(epoch)
        return Masked(self.rows, epoch, self.longer)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        assert self.epoch >= 0, "training takes the rows of an epoch"
        given = super().batch(indices)
        for place, row in enumerate(indices):
            masked = row_random(7, self.epoch, int(row)).random(int(self.lengths[row])) < 1 / 3
            given["tokens"][place, : len(masked)][torch.from_numpy(masked)] = 1
        return given


@dataclass(frozen=True, kw_only=True)
class Masking(Problem):
    data: Masked

    def prepare(self, config: RunConfig) -> Datasets:
        return replace(super().prepare(config), train=self.data)


def test_random_numbers_of_a_row_depend_on_seed_epoch_and_row() -> None:
    drawn = {
        place: row_random(*place).integers(2**62)
        for place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    }
    assert len(set(drawn.values())) == 4
    assert row_random(0, 0, 1).integers(2**62) == drawn[0, 0, 1]


def test_data_that_vary_repeat_themselves_after_a_resume_and_in_loader_processes(
    tmp_path: Path,
) -> None:
    data = Masked(20)  # three steps per epoch
    # Without the proof of the first steps, which takes the rows of epoch 0 once more.
    train(config(tmp_path / "whole", max_steps=8, save_every=4, prove="off"), Masking(data=data))
    assert data.seen == [0, 1, 2]
    again = Masked(20)
    resumed = str(tmp_path / "whole/checkpoints/step-00000004")
    train(
        config(
            tmp_path / "again",
            max_steps=8,
            resume=resumed,
            loader={"workers": 1},
            micro_batch_size=2,
        ),
        Masking(data=again),
    )
    assert again.seen == [1, 2]
    kept = [
        read_tensors(tmp_path / f"{name}/checkpoints/step-00000008") for name in ("whole", "again")
    ]
    assert largest_difference(*kept)[0] < 1e-5


def test_lengths_may_not_vary(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"at\(1\) says that row 0 has length \d+, not \d+; lengths may not vary"
    ):
        train(config(tmp_path / "run", max_steps=8), Masking(data=Masked(20, longer=True)))


class Random(RandomRows):
    """Rows that are masked by random numbers that nobody can repeat."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.random = np.random.default_rng(0)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        given = super().batch(indices)
        noise = torch.from_numpy(self.random.random(given["tokens"].shape))
        return given | {"tokens": torch.where(noise < 0.3, 1, given["tokens"])}


class RandomCollation(Problem):
    def prepare(self, config: RunConfig) -> Datasets:
        return replace(super().prepare(config), train=Random(self.rows))


@pytest.mark.parametrize("workers", [0, 1])
def test_randomness_in_collation_is_refused_in_the_first_step(workers: int, tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"batch\(\) gives other values .* \(at batch\['tokens'\]\), .* at\(epoch\)"
    ):
        train(config(tmp_path / "run", loader={"workers": workers}), RandomCollation())
    assert not steps_in(tmp_path / "run")


class Everything(Problem):
    """Outputs of every kind, of which a report tells all."""

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        kept = batch["tokens"] != 0
        return super().outputs(model, batch) | {
            "tokens": Ragged(batch["tokens"][kept], kept.sum(1))
        }

    def sums(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        right = model(batch["tokens"]).argmax(-1) == batch["labels"]
        return {"right": right.sum(), "tokens": batch["tokens"].flatten().bincount(minlength=32)}

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        tokens = [row.tolist() for row in outputs["tokens"]] if outputs else []
        return super().report(outputs, data) | {"rows": tokens}

    def report_sums(self, sums: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        assert all(total.dtype == torch.float64 for total in sums.values())
        return {name: total.tolist() for name, total in sums.items()}


def check_everything(report: dict[str, Any], rows: int) -> None:
    """Compare a report of ``Everything`` with its evaluation data."""
    data = RandomRows(rows, seed=1)
    assert report["rows"] == [tokens.tolist() for tokens in data.tokens]
    padding = report["tokens"].pop(0)
    counted: Any = np.bincount(np.concatenate(data.tokens), minlength=32)[1:] if rows else []
    assert report["tokens"] == list(counted)
    assert padding >= 0
    assert report["right"] / rows == pytest.approx(report["accuracy"])
    assert report["evaluated"] == report["unique"] == rows


def test_ragged_outputs_and_sums_are_those_of_all_rows_in_order(tmp_path: Path) -> None:
    check_everything(evaluation_of(tmp_path / "run", Everything(evaluation_rows=30)), 30)
    lines = (tmp_path / "run/predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(30))


class OnlySums(Everything):
    outputs = report = predictions = None  # type: ignore[assignment]


def test_sums_alone_evaluate_every_row(tmp_path: Path) -> None:
    wanted = evaluation_of(tmp_path / "both", Everything())
    evaluation = evaluation_of(tmp_path / "sums", OnlySums())
    assert evaluation == {
        key: wanted[key] for key in ("right", "tokens", "evaluated", "unique", "dataset_size")
    }
    assert not (tmp_path / "sums/predictions.jsonl").exists()


class Prompts:
    """Four tokens per row, after which a model of 12 tokens ends at once, soon or not at
    all; 7 is the end.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self.tokens = torch.from_numpy(np.random.default_rng(seed).integers(1, 7, size=(rows, 4)))
        self.lengths, self.items = np.full(rows, 4), np.ones(rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: np.ndarray) -> Tensor:
        return self.tokens[indices]


class Speaks:
    """A tiny gpt2 that is evaluated by what it generates."""

    def prepare(self, config: RunConfig) -> Datasets:
        held_out = Prompts(9, seed=1)
        return Datasets(train=Prompts(24, seed=0), evaluation=held_out, test=held_out)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        sizes: dict[str, Any] = {
            "vocab_size": 12,
            "n_positions": 32,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
        }
        ids: dict[str, Any] = {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 7}
        quiet: dict[str, Any] = {
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "initializer_range": 1.0,
        }
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids, **quiet))

    def row_loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(input_ids=batch).logits[:, :-1].float()
        return F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(1)

    def generate(self, model: Any, batch: Tensor, in_step: bool) -> dict[str, Ragged]:
        mask = torch.ones_like(batch)
        tokens = model.generate(
            input_ids=batch,
            attention_mask=mask,
            max_new_tokens=20,
            do_sample=False,
            synced_gpus=in_step,
        )[:, 4:]
        kept = (tokens == 7).cumsum(1) < 1
        return {"answer": Ragged(tokens[kept], kept.sum(1))}

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        return {"answers": [answer.tolist() for answer in outputs["answer"]]}


class Translates(Speaks):
    """A tiny t5, whose ``generate`` calls encoder and decoder by themselves, without a pass
    of the whole model.
    """

    row_loss: Any = None

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        sizes: dict[str, Any] = {
            "vocab_size": 12,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
        }
        ids: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 7}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, **ids, dropout_rate=0.0)
        )

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(input_ids=batch, labels=batch).logits.float()
        return F.cross_entropy(logits.transpose(1, 2), batch, reduction="none").mean(1).sum()


SPEAKING = {"seed": 1, "max_steps": 1, "micro_batch_size": 1}
STRATEGIES: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {}, "deepspeed": {"stage": 3}}


def evaluate_everything(strategy: str, out: Path) -> list[dict[str, Any]]:
    """Outputs of every kind, fewer rows than ranks, and what two models generate, in
    one start of ranks.
    """
    under = {
        "strategy": strategy,
        "strategy_options": STRATEGIES[strategy],
        "nproc": 2,
        "log_level": "error",
    }
    jobs: list[tuple[Any, RunConfig]] = [
        (Everything(evaluation_rows=11), config(out / "many", **under)),
        (Everything(evaluation_rows=1), config(out / "one", **under)),
        (Speaks(), config(out / "answers", **SPEAKING, **under)),
    ]
    if strategy == "fsdp":  # where a part of the model cannot be called without the whole
        jobs.append((Translates(), config(out / "translations", **SPEAKING, **under)))
    rank_info = join(os.environ)
    assert rank_info is not None
    hooks, world = set_up(
        resolve(jobs[0][1], rank_info.size, rank_info.launcher, task=jobs[0][0]), rank_info
    )
    evaluations = []
    for task, given in jobs:
        resolved = resolve(given, rank_info.size, rank_info.launcher, task=task)
        evaluations.append(train_in(world, resolved, hooks, rank_info)["evaluation"])
    hooks.teardown(world)
    return evaluations


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """Answers that gpt2 and t5 generate in one process."""
    folder = tmp_path_factory.mktemp("spoken")
    answers = [
        evaluation_of(folder / type(task).__name__, task, **SPEAKING)["answers"]
        for task in (Speaks(), Translates())
    ]
    assert len({len(answer) for answer in answers[0]}) > 3, "rows end at different moments"
    return answers


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_evaluate_what_one_process_does(
    strategy: str, tmp_path: Path, spoken: list[list[list[int]]]
) -> None:
    pytest.importorskip(f"distcore_{strategy}")
    by_rank = launch(evaluate_everything, strategy, tmp_path, nproc=2)
    assert by_rank[0] == by_rank[1]
    many, one, *said = by_rank[0]
    check_everything(many, 11)
    check_everything(one, 1)
    assert [each["answers"] for each in said] == spoken[: len(said)]


class NoRowLoss(Simple):
    def data(self) -> Any:
        rows = TensorDataset(torch.ones(8, 1))
        return rows, rows


class NoModel(NoRowLoss):
    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0])


class Column(NoModel):
    def model(self) -> nn.Module:
        return nn.Linear(1, 1)


@pytest.mark.needs("distcore-ddp")
@pytest.mark.parametrize(
    ("task", "message"),
    [
        (NoRowLoss(), "task NoRowLoss: has no row_loss(model, batch), "),
        (NoModel(), "task NoModel: has no model(), "),
    ],
    ids=["row_loss", "model"],
)
def test_a_missing_method_is_found_before_any_process_starts(
    task: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "distcore.jobs.train.launch", lambda *given, **named: pytest.fail("ranks were started")
    )
    with pytest.raises(TaskError, match=re.escape(message)):
        train(config(tmp_path / "run", strategy="ddp", nproc=2), task)
    assert not (tmp_path / "run").exists()


def test_losses_of_a_wrong_shape_name_the_task_and_the_line_of_its_method(tmp_path: Path) -> None:
    line = NoModel.row_loss.__code__.co_firstlineno
    said = (
        r"task Column: row_loss\(\) returned a tensor of shape \(\d, 1\); .*; defined at"
        rf" .*test_task_data.py:{line}$"
    )
    with pytest.raises(TaskError, match=said):
        train(config(tmp_path / "run"), Column())

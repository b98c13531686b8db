"""The methods of a task, in the order in which the core calls them, each with an example
that a test runs.

A task needs ``prepare``, ``build_model``, and ``loss``, ``row_loss``, ``phases``, or ``embed`` with
``batch_loss``. Evaluation needs ``row_loss``, ``outputs`` or ``generate`` with ``report``, or
``sums`` with ``report_sums``. Every other method is optional: the core calls it if the task defines
it. ``BoundTask`` looks them up once. The core tries evaluation and saving before the first step, so
that a broken task fails at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from distcore.config import RunConfig
    from distcore.plugin.task.frozen import FrozenModel, Initial
    from distcore.plugin.task.phases import Phase
    from distcore.plugin.task.ragged import Ragged
    from distcore.plugin.task.step import Step
    from distcore.plugin.task.task import Batch, Dataset, Datasets, FileRows, Losses, Outputs


class TaskSpec(Protocol):
    """The methods of a task, to read and to look up. No class inherits from it.

    A DistcoreError from a method ends the run in one line; any other exception is a failure with a
    traceback. The examples together are a task, and a test trains it. In them ``RandomRows`` is a
    ``Dataset`` of made-up rows, ``Classifier`` a model of token embeddings, and ``F`` is
    ``torch.nn.functional``.

    Attributes are optional as well: ``metrics``, each metric with ``"min"`` or ``"max"`` (default:
    the loss), ``on_resume``, each option that a resumed run may change (``distcore.OnResume``), and
    ``logs``, the names of what the task logs. It also hears the events that it has marked methods
    for, and keeps what ``state`` returns.
    """

    def suggest(self, config: RunConfig) -> Mapping[str, object]:
        """Return values by key of ``RunConfig`` for keys that the user left at 'auto'.
        Must not read data.

        The core asks for ``lr`` and ``padding_free``.

        Example::

            def suggest(self, config: RunConfig) -> dict[str, object]:
                return {"lr": 0.01}
        """

    def prepare(self, config: RunConfig) -> Datasets:
        """Read, check and cache the data; called before ranks start, then on each
        rank, from the cache.

        Every rank must get the same rows in the same order. Raises DistcoreError for rows
        that cannot be used.

        Example::

            def prepare(self, config: RunConfig) -> Datasets:
                train, held_out = RandomRows(50, seed=config.seed), RandomRows(11, seed=1)
                facts = {"classes": 4}
                return Datasets(train=train, evaluation=held_out, test=held_out, facts=facts)
        """

    def why_not_padding_free(self) -> str | None:
        """Return why the configured model cannot compute rows without padding; ``None`` if it can.

        Also a reason: that it is not known to be exact. Must not read data.

        Example::

            def why_not_padding_free(self) -> str | None:
                return None
        """

    def skipped_fraction(self) -> float:
        """Return the fraction of per-token compute that the padding-free model skips, from 0 to 1.

        Such as the last layer of all tokens that the head does not read. Must not read data.

        Example::

            def skipped_fraction(self) -> float:
                return 0.25
        """

    def weights_folder(self, config: RunConfig) -> Path | None:
        """Return the local folder whose safetensors files hold the weights; ``None`` for random
        ones or a hub's.

        For files of another format, ``build_model`` may give a meta model a function
        ``safetensors_folder`` without arguments, which converts them and returns their folder.

        Example::

            def weights_folder(self, config: RunConfig) -> Path | None:
                folder = Path("pretrained")
                return folder if any(folder.glob("*.safetensors")) else None
        """

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model in fp32 on torch's default device; the core has seeded the random state.

        On the meta device it must not read weights. If it fails there, or gives tensors values,
        sharding strategies build the model whole. Raises DistcoreError if the model cannot be
        built.

        Example::

            def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
                return Classifier(dropout=0.0)
        """

    def phases(self) -> Mapping[str, Phase]:
        """Return the phases of each step, in order: each has a loss and steps the
        parameters of a pattern.

        They replace ``loss``: first the discriminator, then the generator. All are on the rows of
        the same step, each with the weights that the phase before left, and their losses are logged
        by name. A loss calls the model once; every trained parameter needs a phase. The optimizer
        is one, with settings for each phase; schedule and average take one step.

        Example::

            def phases(self) -> dict[str, Phase]:
                def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
                    return F.cross_entropy(model(batch["tokens"]), batch["labels"], reduction="sum")

                settings = {"betas": (0.9, 0.999)}
                return {"classifier": Phase(r"^(embedding|blocks|head)", loss, settings)}
        """

    def frozen(self, config: RunConfig, data: Datasets) -> Mapping[str, FrozenModel | Initial]:
        """Return the models that are used but not trained, by name: references, teachers, encoders.

        ``INITIAL`` is the trained model before its first step. A strategy prepares each like the
        model of an evaluation. Checkpoints have a digest of their weights, not the weights, so that
        a resume with others is refused. Their outputs have no gradient: a module that passes
        gradients on belongs into the model, with ``freeze``.

        Example::

            def frozen(self, config: RunConfig, data: Datasets) -> dict[str, FrozenModel]:
                return {"teacher": FrozenModel(lambda config, data: Classifier())}
        """

    def enable_padding_free(self, module: nn.Module) -> Callable[[], None]:
        """Make ``module``, from ``build_model``, skip padding from now on; return a
        function that undoes it.

        Called at most once for a model, after a strategy has wrapped it, and on every rank. Outputs
        and gradients stay the same; before the first step the core compares the losses of some rows
        with those of the padded form.

        Example::

            def enable_padding_free(self, module: nn.Module) -> Callable[[], None]:
                def pre_hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                    return (inputs[0].contiguous(),)

                return module.register_forward_pre_hook(pre_hook).remove
        """

    def select_logits(self, module: nn.Module, data: Datasets) -> Datasets:
        """Make ``module`` compute logits at target positions only; return ``data``
        whose batches mark them.

        Called after ``enable_padding_free``, if rows are computed without padding. Losses and
        gradients stay the same. Unmarked batches, from the old ``data`` or from ``padded`` of a
        dataset, still get all logits.

        Example::

            def select_logits(self, module: nn.Module, data: Datasets) -> Datasets:
                return data  # one prediction per row: every logit is at a target
        """

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write further files for users of the model into the run folder, on the main rank.

        Called before the first step. A failure ends the run on every rank, in one line.

        Example::

            def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
                names = ["sport", "science", "politics", "weather"]
                (folder / "classes.json").write_text(json.dumps(names))
        """

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows, enough for ``build_model`` and ``save``, from
        the files of ``save``.

        ``None`` if it wrote nothing into ``folder``. Without this method an export
        prepares the data again.

        Example::

            def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
                none = RandomRows(0, seed=0)
                return Datasets(train=none, evaluation=none, test=none)
        """

    def consult(self, frozen: Mapping[str, Callable[..., Any]], batch: Batch) -> Batch:
        """Return ``batch`` with the frozen models' outputs for its rows; called before each method
        that gets a batch.

        The output for a row must depend on that row alone. Without gradient, under the core's
        autocast, in evaluation mode.

        Example::

            def consult(
                self, frozen: Mapping[str, Any], batch: dict[str, Tensor]
            ) -> dict[str, Tensor]:
                return batch | {"taught": frozen["teacher"](batch["tokens"])}
        """

    def loss(self, model: nn.Module, batch: Batch) -> Losses:
        """Return the *sum* of the loss over the items of ``batch``, a scalar with gradient.
        The core divides, once.

        ``batch`` is on the device of ``model``, which runs under the core's autocast: return fp32,
        as torch's losses do there. Return a pair with a dict for additional terms, each a sum by
        name. The core divides a term by its ``counts`` in the dataset, by default by the items, and
        logs it: list the name in ``logs``. With an argument ``log``, ``log(name, value, weight)``
        logs the mean of a sum over ``weight`` items.

        Example::

            def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
                logits = model(batch["tokens"])  # (n, classes)
                return F.cross_entropy(logits, batch["labels"], reduction="sum")
        """

    def train_step(self, step: Step) -> Tensor:
        """Make one optimizer step through the handle ``step``; return this rank's share of the
        loss, to be logged.

        For steps of several passes, or with changed gradients. It must call ``step.apply()`` and be
        the same on every rank. State between steps belongs in ``step.state``. Learning rate and
        averaged weights advance once.

        Example::

            def train_step(self, step: Step) -> Tensor:
                loss = step.gradients()
                step.apply()
                return loss
        """

    def row_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each row of ``batch``, fp32 ``(n,)``, with gradient.

        Called if the task has no ``loss``, and in evaluation, as the output ``loss``, if it has
        neither ``outputs`` nor ``sums``. The loss of a row with several items is their sum.

        Example::

            def row_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
                return F.cross_entropy(model(batch["tokens"]), batch["labels"], reduction="none")
        """

    def embed(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the embeddings of each row for ``batch_loss``, ``(n, …)`` by name, with gradient.

        Called twice for all micro-batches of a step but the last, with the same random numbers. A
        trained parameter of the loss, such as a temperature, is an output of this method, too,
        repeated for each row.

        Example::

            def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
                losses = F.cross_entropy(model(batch["tokens"]), batch["labels"], reduction="none")
                return {"loss": losses}
        """

    def batch_loss(self, embeddings: dict[str, Tensor], rows: Tensor) -> Tensor:
        """Return the loss of a whole global batch, a scalar; it replaces ``loss``
        and is not divided.

        ``embeddings`` are from all ranks and micro-batches, fp32, the same on every rank; ``rows``
        are the row numbers, ascending. A task that uses it only under some options has an attribute
        ``whole_batch``.

        Example::

            def batch_loss(self, embeddings: dict[str, Tensor], rows: Tensor) -> Tensor:
                return embeddings["loss"].mean()
        """

    def outputs(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor | Ragged]:
        """Return outputs for evaluation: tensors ``(n, …)``, one entry per row, on
        the device of ``batch``.

        The dtype may be any, and must be the same for every batch, as must all dimensions but the
        first. Return a ``distcore.Ragged`` of n rows for rows of different sizes. Called without
        gradient, in evaluation mode; the core keeps outputs on the CPU. The name ``index`` is
        reserved.

        Example::

            def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
                logits, label = model(batch["tokens"]).float(), batch["labels"]
                loss = F.cross_entropy(logits, label, reduction="none")
                return {"loss": loss, "prediction": logits.argmax(-1), "label": label}
        """

    def generate(
        self, model: nn.Module, batch: Batch, in_step: bool
    ) -> Mapping[str, Tensor | Ragged]:
        """Return more outputs, under names that ``outputs`` does not use; called after it,
        for the same batch.

        ``model`` comes from ``build_model``, without the strategy's wrapper, and has its own
        methods. ``in_step``: all ranks must call the model equally often, because each call needs
        every rank's part of the weights; ``generate`` of transformers calls this ``synced_gpus``.
        Call the whole model, not a part of it.

        Example::

            def generate(
                self, model: nn.Module, batch: dict[str, Tensor], in_step: bool
            ) -> dict[str, Tensor]:
                tokens = batch["tokens"]
                calls = 2  # as many on every rank, so that it need not ask ``in_step``
                for _ in range(calls):
                    tokens = torch.cat([tokens, model(tokens).argmax(-1, keepdim=True) + 1], dim=1)
                return {"next": tokens[:, -calls:]}
        """

    def sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return sums over the rows of ``batch``, by name, on any device; each has one
        shape for all batches.

        The core adds them up in float64 over all rows of the dataset, each once.
        Called as ``outputs`` is.

        Example::

            def sums(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
                right = model(batch["tokens"]).argmax(-1) == batch["labels"]
                return {"right": right.sum(), "rows": torch.tensor(len(right))}
        """

    def report(self, outputs: Outputs, data: Datasets) -> dict[str, object]:
        """Turn the outputs of a whole dataset, on the CPU and in its order, into
        metrics as JSON values.

        Without rows ``outputs`` is empty; the metrics must be there all the same. Before the first
        step it is tried on the outputs of one micro-batch, repeated until there is one for each row
        of the evaluation data.

        Example::

            def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
                if not outputs:
                    return {"loss": 0.0, "accuracy": 0.0}
                right = outputs["prediction"] == outputs["label"]
                loss, accuracy = outputs["loss"].mean(), right.float().mean()
                return {"loss": loss.item(), "accuracy": accuracy.item()}
        """

    def report_sums(self, sums: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        """Turn the sums over a whole dataset, float64 on the CPU, into metrics as JSON values.

        Without rows ``sums`` is empty; the metrics must be there all the same. No metric may have
        the name of one of ``report``.

        Example::

            def report_sums(self, sums: dict[str, Tensor], data: Datasets) -> dict[str, object]:
                return {"share_right": (sums["right"] / sums["rows"]).item() if sums else 0.0}
        """

    def predictions(self, outputs: Outputs, data: Datasets) -> Iterable[dict[str, object]]:
        """Turn the outputs of ``data.test`` into the lines of ``predictions.jsonl``, one
        JSON object per row.

        Example::

            def predictions(
                self, outputs: dict[str, Tensor], data: Datasets
            ) -> Iterable[dict[str, object]]:
                labels = outputs["prediction"].tolist() if outputs else []
                for index, prediction in enumerate(labels):
                    yield {"index": index, "prediction": prediction}
        """

    def row_columns(self) -> Mapping[str, str]:
        """Return the columns of a file with rows to predict, by the option
        that names each (``columns.text``).

        Example::

            def row_columns(self) -> Mapping[str, str]:
                return {"columns.text": "text"}
        """

    def open_rows(self, source: Path, others: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        """Yield the records to predict from a file or folder, the same each time; raises DataError.

        A record ends with the values of the columns ``others``, by option name: none, or the id
        column of the user. Takes precedence over ``row_columns``.

        Example::

            def open_rows(
                self, source: Path, others: Mapping[str, str]
            ) -> Iterator[tuple[object, ...]]:
                for row in map(json.loads, source.read_text().splitlines()):
                    yield row["text"], *(row[column] for column in others.values())
        """

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return a dataset of ``rows`` to predict, in this order; raises DataError
        for an unusable row.

        ``data`` comes from ``reopen``. ``outputs`` or ``generate`` gets the batches
        of the dataset; ``predictions`` gets their results, with the dataset as ``data.test``. It
        yields one line per row. The core adds file and row, unless the line has its own ``file``.
        Called for all rows of a file, some thousands at a time, before the first
        prediction, and then again on every rank: slow work belongs into ``batch``.

        Example::

            def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
                return RandomRows(len(rows.records), seed=rows.start)
        """

"""The laws for tasks: the part that a task must keep, in one process, so that strategies
can keep the rest.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distcore.checkpoint.distance import difference
from distcore.checkpoint.job_state import fingerprint
from distcore.engine.frozen import frozen_source
from distcore.errors import MetaModelError
from distcore.model.dropout import CountsDraws
from distcore.model.model_source import model_source
from distcore.model.row_dropout import other_generators
from distcore.plugin.batching.columns import read
from distcore.plugin.options import values_of
from distcore.plugin.task.datasets import at_epoch, content_of, counts_of, made_anew
from distcore.plugin.task.outputs import Collected
from distcore.plugin.task.phases import parameters_by_phase
from distcore.resolve import tasks
from distcore.testing.findings import EXACT, FP32, Measured, Skip, needs, none_of
from distcore.testing.random_state import change_random_state
from distcore.testing.task_comparison import (
    AlwaysTraining,
    Launcher,
    count_differing,
    differing_weights,
    gradient,
    largest_error,
    same,
)
from distcore.testing.task_lab import TaskLab, on_another_rank
from distcore.testing.task_suite import TASKS

MAX_ROWS = 100_000
"""Largest number of rows whose items are checked."""


@TASKS.law("order")
def same_rows_again(lab: TaskLab) -> Measured:
    """``prepare`` gives the same rows in the same order each time, as it must on every rank.

    Rows that are kept are those that the task makes now, whatever rows are made together.
    """
    with on_another_rank(), change_random_state(1):
        data_again = lab.task.prepare(lab.config)
    differing = []
    for name in ("train", "evaluation", "test"):
        first = getattr(lab.data, name)
        second = getattr(data_again, name)
        if fingerprint(first) != fingerprint(second):
            differing.append(name)
            continue
        rows = lab.rows(first)
        if count_differing(first.batch(rows), second.batch(rows)):
            differing.append(name)
            continue
        anew = made_anew(first, rows)
        if anew is not None and count_differing(first.batch(rows), anew):
            differing.append(f"{name} (rows made anew, with others beside them)")
    return none_of(differing, "datasets that differ")


@TASKS.law("order")
def same_batch_again(lab: TaskLab) -> Measured:
    """The same rows give the same batch whatever the random state, or a resumed
    run would see others.
    """
    differing = 0
    for epoch in range(2):
        with change_random_state(epoch):
            dataset = at_epoch(lab.data.train, epoch)
            first = dataset.batch(lab.rows(dataset))
        with change_random_state(epoch + 100):
            dataset_again = at_epoch(lab.data.train, epoch)
            second = dataset_again.batch(lab.rows(dataset_again))
        differing += count_differing(first, second)
    note = "leaves of a batch that differ; random numbers belong into at()"
    return Measured(error=differing, bound=EXACT, note=note)


@TASKS.law("gradient")
def items_count(lab: TaskLab) -> Measured:
    """``items`` has a whole number of at least 0 for each row, and not 0 for all of them."""
    rows = min(len(lab.data.train), MAX_ROWS)
    items = np.asarray(lab.data.train.items[np.arange(rows)])
    are_integers = np.issubdtype(items.dtype, np.integer)
    # With nothing but zeros the mean loss would be over no items.
    has_items = rows == 0 or bool((items > 0).any())
    wrong = int((items < 0).sum())
    wrong += items.shape != (rows,)
    wrong += not are_integers
    wrong += not has_items
    note = f"items of shape {items.shape} and {items.dtype} for {rows} rows"
    return Measured(error=wrong, bound=EXACT, note=note)


@TASKS.law("gradient")
def draws_no_numbers(lab: TaskLab) -> Measured:
    """Model and loss draw no random numbers, with dropout off: what they draw would
    follow from the rank.
    """
    place = _place_of_draws(lab)
    remedy = "distcore.row_random in at(epoch) of the dataset draws by row"
    note = f"draws at random: {place}; {remedy}" if place else "none"
    return Measured(error=float(bool(place)), bound=EXACT, note=note)


def _place_of_draws(lab: TaskLab) -> str:
    """Return where a forward pass with its loss draws random numbers; empty if it draws none."""
    model = lab.build()
    batch = lab.train_batch()
    compute = lab.embeddings if lab.task.losses.whole_batch else lab.all_terms
    # The first call may build frozen models, which draws their weights.
    compute(model, batch)
    before = other_generators()
    with CountsDraws() as drawn:  # type: ignore[no-untyped-call]
        compute(model, batch)
    if drawn.count:
        return drawn.place or "the model"
    return "" if before == other_generators() else "the task, from Python's or numpy's generator"


@TASKS.law("gradient")
def loss_is_a_sum(lab: TaskLab) -> Measured:
    """Loss and gradient of a batch, additional terms included, are the sums over its rows
    alone, with dropout off.
    """
    why_not = "the loss is one over the global batch: embeds-rows-alone measures what it reads"
    needs(not lab.task.losses.whole_batch, why_not)
    needs(not _place_of_draws(lab), "the loss draws at random: draws-no-numbers says where")
    rows = lab.rows(lab.data.train)
    batch = lab.data.train.batch(rows)
    model = lab.build()
    model_of_rows = lab.build()
    mixes_rows = any(isinstance(part, _BatchNorm) and part.training for part in model.modules())
    needs(not mixes_rows, "batch normalization is over all rows of a step")
    loss, _ = lab.all_terms(model, batch)
    # Differs if a state other than the weights, such as a count of calls, changes the loss.
    with torch.no_grad():
        loss_again, _ = lab.all_terms(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    sum_of_rows = torch.zeros(())
    for row in rows:
        loss_of_row, _ = lab.all_terms(model_of_rows, lab.data.train.batch(row[None]))
        loss_of_row.backward()  # type: ignore[no-untyped-call]
        sum_of_rows = sum_of_rows + loss_of_row.detach()
    error_of_second = difference(loss_again, loss.detach()).relative
    error_of_loss = difference(loss.detach(), sum_of_rows).relative
    error_of_gradient = difference(gradient(model), gradient(model_of_rows)).relative
    note = (
        f"loss {error_of_loss:.1e}, gradient {error_of_gradient:.1e} off for {len(rows)} rows;"
        f" {error_of_second:.1e} off the second time"
    )
    error = max(error_of_loss, error_of_gradient, error_of_second)
    return Measured(error=error, bound=FP32, note=note)


@TASKS.law("gradient")
def embeds_rows_alone(lab: TaskLab) -> Measured:
    """An embedding that a loss over the global batch reads depends on its row
    alone, with dropout off.
    """
    needs(lab.task.losses.whole_batch, "the loss is a sum over rows")
    needs(not _place_of_draws(lab), "the embedding draws at random: draws-no-numbers says where")
    rows = lab.rows(lab.data.train)
    model = lab.build()
    together = lab.embeddings(model, lab.data.train.batch(rows))
    alone = [lab.embeddings(model, lab.data.train.batch(row[None])) for row in rows]
    errors = {}
    for name, values in together.items():
        values_of_rows = torch.cat([embeddings[name] for embeddings in alone])
        errors[name] = difference(values, values_of_rows).relative
    worst = max(errors, key=lambda name: errors[name])
    return Measured(error=errors[worst], bound=FP32, note=f"largest difference in {worst!r}")


@TASKS.law("gradient")
def terms_count(lab: TaskLab) -> Measured:
    """The additional terms of the loss are declared in ``logs``, and rows have counts
    of no other names.
    """
    needs(not lab.task.losses.whole_batch, "the loss is one over the global batch")
    _, terms = lab.all_terms(lab.build(), lab.train_batch())
    undeclared = terms.keys() - {*lab.task.logs}
    missing = counts_of(lab.data.train).keys() - terms.keys()
    wrong = sorted(undeclared | missing)
    note = f"not declared, or counted and not there: {wrong or 'none'}"
    return Measured(error=len(wrong), bound=EXACT, note=note)


@TASKS.law("gradient")
def phases_reach_theirs(lab: TaskLab) -> Measured:
    """The loss of each phase calls the model once, and gives a gradient to every parameter
    that the phase steps.
    """
    needs(lab.task.has("phases"), "the task has no phases()")
    model = lab.build()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    names_by_phase = parameters_by_phase(lab.task.losses.phases, trained)
    wrong = []
    for phase, names in names_by_phase.items():
        launcher = Launcher(model)
        loss = lab.loss_of_phase(phase, launcher, lab.train_batch())
        loss.backward()  # type: ignore[no-untyped-call]
        if launcher.calls != 1:
            wrong.append(f"{phase}: {launcher.calls} calls")
        untouched = [name for name in sorted(names) if launcher.gradient(name) is None]
        wrong += [f"{phase}: {name}" for name in untouched]
    return none_of(wrong, "calls, or without gradient")


@TASKS.law("gradient")
def loss_counts_items(lab: TaskLab) -> Measured:
    """The reported loss is the training loss per item: ``items`` counts what the loss adds up."""
    needs(not lab.task.losses.whole_batch, "the loss is one over the global batch")
    needs(not lab.task.has("phases"), "the loss is a sum over phases")
    model = lab.build()
    few, collected = lab.evaluate_few(model)
    reported = lab.task.evaluation.metrics(collected, few.evaluation, few).get("loss")
    if not isinstance(reported, int | float):
        raise Skip("the task reports no loss")
    rows = np.arange(len(few.evaluation))
    with torch.no_grad():
        loss = lab.loss(model, few.evaluation.batch(rows))
    items = int(read(few.evaluation.items, rows).sum())
    expected = float(loss) / items if items else 0.0
    error = abs(reported - expected) / max(abs(expected), 1e-12)
    note = f"reported {reported:.6g}, {expected:.6g} from loss() and items"
    return Measured(error=error, bound=FP32, note=note)


@TASKS.law("gradient")
def loss_is_fp32(lab: TaskLab) -> Measured:
    """The loss is a scalar in fp32, also under autocast to bf16."""
    model = lab.build()
    batch = lab.train_batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = lab.loss(model, batch)
    is_fp32 = loss.dtype == torch.float32
    is_scalar = loss.dim() == 0
    wrong = [is_fp32, is_scalar, loss.requires_grad].count(False)
    gradient_or_none = "with gradient" if loss.requires_grad else "without gradient"
    note = f"{loss.dtype}, shape {tuple(loss.shape)}, {gradient_or_none}"
    return Measured(error=wrong, bound=EXACT, note=note)


@TASKS.law("gradient")
def through_the_model(lab: TaskLab) -> Measured:
    """The loss reaches parameters through ``model(...)`` alone; a strategy sees no other way."""
    model = lab.build()
    batch = lab.train_batch()
    launcher = Launcher(model)
    try:
        loss = lab.loss(launcher, batch)
    except AttributeError as error:
        return Measured(error=1, bound=EXACT, note=f"loss() asks for more than model(...): {error}")
    loss.backward()  # type: ignore[no-untyped-call]
    # A call computes with copies, so a gradient here came by another way.
    bypassed = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    note = (
        f"parameters reached on another way: {', '.join(bypassed[:3]) or 'none'}; calls of the"
        f" model: {launcher.calls}"
    )
    is_never_called = launcher.calls == 0
    return Measured(error=len(bypassed) + is_never_called, bound=EXACT, note=note)


@TASKS.law("evaluation")
def rows_alone(lab: TaskLab) -> Measured:
    """A row's outputs do not depend on other rows of its batch; sums are sums over rows."""
    model = lab.build_moved()
    rows = lab.rows(lab.data.evaluation)
    together = lab.evaluate(model, lab.data.evaluation.batch(rows), len(rows))
    alone = [lab.evaluate(model, lab.data.evaluation.batch(row[None]), 1) for row in rows]
    errors = [(0.0, "no outputs")]
    for name, values in together.outputs.items():
        for position, collected in enumerate(alone):
            error = largest_error(values[position], collected.outputs[name][0])
            errors.append((error, f"output {name!r}"))
    for name, total in together.sums.items():
        sum_of_rows = torch.stack([collected.sums[name] for collected in alone]).sum(0)
        errors.append((difference(total, sum_of_rows).relative, f"sum {name!r}"))
    worst, where = max(errors)
    return Measured(error=worst, bound=FP32, note=f"largest difference in {where}")


@TASKS.law("evaluation")
def evaluation_changes_nothing(lab: TaskLab) -> Measured:
    """An evaluation gives the same twice and leaves parameters and buffers as they were."""
    torch.manual_seed(lab.config.seed)
    model = lab.task.build_model(lab.config, lab.data)
    before = copy.deepcopy(model.state_dict())
    rows = lab.rows(lab.data.evaluation)
    batch = lab.data.evaluation.batch(rows)
    with change_random_state(1):
        first = lab.evaluate(model, batch, len(rows))
    with change_random_state(2):
        second = lab.evaluate(model, batch, len(rows))
    after = model.state_dict()
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    differing = _differing_results(first, second)
    note = (
        f"changed: {', '.join(changed[:3]) or 'none'}; differ between two calls:"
        f" {', '.join(differing) or 'none'}"
    )
    return Measured(error=len(changed) + len(differing), bound=EXACT, note=note)


@TASKS.law("evaluation")
def asks_no_wrapper(lab: TaskLab) -> Measured:
    """An evaluation gives the same if the wrapper of the model says that it trains: wrappers
    say what they like.
    """
    torch.manual_seed(lab.config.seed)
    model = lab.task.build_model(lab.config, lab.data)
    rows = lab.rows(lab.data.evaluation)
    batch = lab.data.evaluation.batch(rows)
    first = lab.evaluate(model, batch, len(rows))
    second = lab.evaluate(AlwaysTraining(model), batch, len(rows), model)
    differing = _differing_results(first, second)
    return none_of(differing, "outputs that differ: is `training` of a model read")


def _differing_results(first: Collected, second: Collected) -> list[str]:
    """Return the names of outputs and sums of two evaluations that differ in any bit."""
    differing = []
    for name, output in first.outputs.items():
        if not same(output, second.outputs[name]):
            differing.append(name)
    for name, total in first.sums.items():
        if not torch.equal(total, second.sums[name]):
            differing.append(name)
    return differing


@TASKS.law("evaluation")
def metrics_are_there(lab: TaskLab) -> Measured:
    """The report has a number for every metric that the task declares, and the
    same names without rows.
    """
    few, collected = lab.evaluate_few(lab.build())
    evaluation = lab.task.evaluation
    declared = lab.task.declared_metrics
    metrics = evaluation.metrics(collected, few.evaluation, few)
    missing = [name for name in declared if not isinstance(metrics.get(name), int | float)]
    if declared:
        metrics_without_rows = evaluation.metrics(Collected(), few.evaluation, few)
        missing += [name for name in declared if name not in metrics_without_rows]
    return none_of(missing, "not there or no number")


@TASKS.law("evaluation")
def predictions_for_all_rows(lab: TaskLab) -> Measured:
    """``predictions`` gives one JSON object for each row."""
    needs(lab.task.predictions.are_written, "the task has no predictions()")
    few, collected = lab.evaluate_few(lab.build())
    lines = len(list(lab.task.predictions.lines(collected.outputs, few)))
    rows = len(few.evaluation)
    return Measured(error=abs(lines - rows), bound=EXACT, note=f"{lines} lines for {rows} rows")


@TASKS.law("checkpoint")
def same_weights_again(lab: TaskLab) -> Measured:
    """The same seed builds the same model, as it must on every rank."""
    first = lab.build().state_dict()
    second = lab.build().state_dict()
    differing = []
    for name, tensor in first.items():
        if name not in second or not torch.equal(tensor, second[name]):
            differing.append(name)
    return none_of(differing, "tensors that differ")


@TASKS.law("checkpoint")
def same_weights_in_parts(lab: TaskLab) -> Measured:
    """A model whose weights are read or drawn in parts equals one that is built whole;
    so do frozen models.
    """
    config, task, data = lab.config, lab.task, lab.data
    sources = {"": model_source(config, task, data)}
    if task.has("frozen"):
        for name, frozen_model in task.frozen(config, data).items():
            prefix = f"frozen {name}: "
            sources[prefix] = frozen_source(config, task, data, frozen_model)
    differing: list[str] = []
    reasons: list[str] = []
    for prefix, source in sources.items():
        if source.replay is None:
            reasons.append("nothing of it is read in parts")
            continue
        try:
            model, values = source.replay()
        except MetaModelError as reason:
            # Then every rank builds it whole, which is right but takes more memory.
            reasons.append(str(reason))
            continue
        names = differing_weights(model, values, source.build())
        differing += [f"{prefix}{name}" for name in names]
    if len(reasons) == len(sources):
        raise Skip(f"every rank builds it whole: {reasons[0]}")
    return none_of(differing, "parameters that differ")


@TASKS.law("checkpoint")
def reopens_without_data(lab: TaskLab) -> Measured:
    """The files of ``save`` are enough to build the same model again."""
    needs(lab.task.has("reopen"), "the task has no reopen(): an export prepares its data again")
    folder = lab.folder / "saved"
    folder.mkdir(exist_ok=True)
    lab.task.save(folder, lab.config, lab.data)
    data = lab.task.reopen(folder, lab.config)
    if data is None:
        note = "reopen() does not know the folder that save() wrote"
        return Measured(error=1, bound=EXACT, note=note)
    expected = _shapes(lab.build())
    actual = _shapes(lab.task.build_model(lab.config, data))
    names = expected.keys() | actual.keys()
    differing = sorted(name for name in names if expected.get(name) != actual.get(name))
    return none_of(differing, "tensors that differ")


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each parameter and persistent buffer by name."""
    return {name: value.shape for name, value in model.state_dict().items()}


@TASKS.law("resume")
def rows_are_identified(lab: TaskLab) -> Measured:
    """The training rows have a digest of their content, so that a resume on others is refused."""
    content = content_of(lab.data.train)
    if content is None:
        reason = (
            "the training data has no `content`: a resume on other rows of the same lengths would"
            " not be seen"
        )
        raise Skip(reason)
    is_digest = isinstance(content, str) and bool(content)
    return Measured(error=not is_digest, bound=EXACT, note=f"content {content!r:.20}")


@TASKS.law("resume")
def options_survive(lab: TaskLab) -> Measured:
    """The options that config.yaml records build the same task again."""
    options = lab.config.task_options
    options_again = values_of(tasks.load_task(lab.config).task)
    differing = [name for name, value in options.items() if options_again.get(name) != value]
    return none_of(differing, "options that differ")


@TASKS.law("surprise")
def builds_without_storage(lab: TaskLab) -> Measured:
    """The model can be built on the meta device, so that a strategy that shards
    never holds it whole.
    """
    try:
        with torch.device("meta"):
            model = lab.task.build_model(lab.config, lab.data)
    except Exception as error:  # whatever build_model does with values that are not there
        reason = (
            "build_model() needs values of tensors, so each rank builds it whole:"
            f" {type(error).__name__}"
        )
        raise Skip(reason) from None
    real = lab.build().state_dict()
    differing = sorted(real.keys() ^ model.state_dict().keys())
    return none_of(differing, "tensors that differ")

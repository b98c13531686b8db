"""The laws for tasks: the part that a task must keep, in one process, so that strategies
can keep the rest.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
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
    largest,
    same,
)
from distcore.testing.task_lab import TaskLab, on_another_rank
from distcore.testing.task_suite import TASKS

MOST_ROWS = 100_000
"""Largest number of rows whose items are checked."""


@TASKS.law("order")
def same_rows_again(lab: TaskLab) -> Measured:
    """``prepare`` gives the same rows in the same order each time, as it must on every rank.

    Rows that are kept are those that the task makes now, whatever rows are made together.
    """
    with on_another_rank(), change_random_state(1):
        again = lab.task.prepare(lab.config)
    differing = []
    for name in ("train", "evaluation", "test"):
        one, other = getattr(lab.data, name), getattr(again, name)
        rows = lab.rows(one)
        if fingerprint(one) != fingerprint(other) or count_differing(
            one.batch(rows), other.batch(rows)
        ):
            differing.append(name)
            continue
        anew = made_anew(one, rows)
        if anew is not None and count_differing(one.batch(rows), anew):
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
            one = at_epoch(lab.data.train, epoch)
            first = one.batch(lab.rows(one))
        with change_random_state(epoch + 100):
            other = at_epoch(lab.data.train, epoch)
            differing += count_differing(first, other.batch(lab.rows(other)))
    return Measured(
        error=differing,
        bound=EXACT,
        note="leaves of a batch that differ; random numbers belong into at()",
    )


@TASKS.law("gradient")
def items_count(lab: TaskLab) -> Measured:
    """``items`` has a whole number of at least 0 for each row, and not 0 for all of them."""
    rows = min(len(lab.data.train), MOST_ROWS)
    items = np.asarray(lab.data.train.items[np.arange(rows)])
    wrong = int(items.shape != (rows,)) + int(not np.issubdtype(items.dtype, np.integer))
    wrong += int((items < 0).sum()) + int(rows > 0 and not (items > 0).any())
    return Measured(
        error=wrong,
        bound=EXACT,
        note=f"items of shape {items.shape} and {items.dtype} for {rows} rows",
    )


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
    model, batch = lab.build(), lab.data.train.batch(lab.rows(lab.data.train))
    compute = lab.embeddings if lab.task.losses.whole_batch else lab.all_terms
    compute(model, batch)  # a first call may build frozen models
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
    needs(
        not lab.task.losses.whole_batch,
        "the loss is one over the global batch: embeds-rows-alone measures what it reads",
    )
    needs(not _place_of_draws(lab), "the loss draws at random: draws-no-numbers says where")
    rows = lab.rows(lab.data.train)
    whole, parts, batch = lab.build(), lab.build(), lab.data.train.batch(rows)
    mixes = any(isinstance(part, _BatchNorm) and part.training for part in whole.modules())
    needs(not mixes, "batch normalization is over all rows of a step")
    together, _ = lab.all_terms(whole, batch)
    with torch.no_grad():
        again = difference(
            lab.all_terms(whole, batch)[0], together
        ).relative  # a state other than the weights changes it
    together.backward()  # type: ignore[no-untyped-call]
    alone = torch.zeros(())
    for row in rows:
        part, _ = lab.all_terms(parts, lab.data.train.batch(row[None]))
        part.backward()  # type: ignore[no-untyped-call]
        alone = alone + part.detach()
    of_loss = difference(together.detach(), alone).relative
    of_gradient = difference(gradient(whole), gradient(parts)).relative
    note = (
        f"loss {of_loss:.1e}, gradient {of_gradient:.1e} off for {len(rows)} rows; {again:.1e} off"
        " the second time"
    )
    return Measured(error=max(of_loss, of_gradient, again), bound=FP32, note=note)


@TASKS.law("gradient")
def embeds_rows_alone(lab: TaskLab) -> Measured:
    """An embedding that a loss over the global batch reads depends on its row
    alone, with dropout off.
    """
    needs(lab.task.losses.whole_batch, "the loss is a sum over rows")
    needs(not _place_of_draws(lab), "the embedding draws at random: draws-no-numbers says where")
    rows, model = lab.rows(lab.data.train), lab.build()
    together = lab.embeddings(model, lab.data.train.batch(rows))
    alone = [lab.embeddings(model, lab.data.train.batch(row[None])) for row in rows]
    apart = {
        name: difference(value, torch.cat([one[name] for one in alone])).relative
        for name, value in together.items()
    }
    worst = max(apart, key=lambda name: apart[name])
    return Measured(error=apart[worst], bound=FP32, note=f"largest difference in {worst!r}")


@TASKS.law("gradient")
def terms_count(lab: TaskLab) -> Measured:
    """The additional terms of the loss are declared in ``logs``, and rows have counts
    of no other names.
    """
    needs(not lab.task.losses.whole_batch, "the loss is one over the global batch")
    given = set(lab.all_terms(lab.build(), lab.data.train.batch(lab.rows(lab.data.train)))[1])
    wrong = sorted((given - {*lab.task.logs}) | (counts_of(lab.data.train).keys() - given))
    return Measured(
        error=len(wrong),
        bound=EXACT,
        note=f"not declared, or counted and not there: {wrong or 'none'}",
    )


@TASKS.law("gradient")
def phases_reach_theirs(lab: TaskLab) -> Measured:
    """The loss of each phase calls the model once, and gives a gradient to every parameter
    that the phase steps.
    """
    needs(lab.task.has("phases"), "the task has no phases()")
    model, wrong = lab.build(), []
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for phase, names in parameters_by_phase(lab.task.losses.phases, trained).items():
        launcher = Launcher(model)
        lab.loss_of_phase(
            phase, launcher, lab.data.train.batch(lab.rows(lab.data.train))
        ).backward()  # type: ignore[no-untyped-call]
        wrong += [f"{phase}: {launcher.calls} calls"] if launcher.calls != 1 else []
        wrong += [f"{phase}: {name}" for name in sorted(names) if launcher.gradient(name) is None]
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
    with torch.no_grad():
        total = lab.loss(model, few.evaluation.batch(np.arange(len(few.evaluation))))
    items = int(read(few.evaluation.items, np.arange(len(few.evaluation))).sum())
    expected = float(total) / items if items else 0.0
    error = abs(reported - expected) / max(abs(expected), 1e-12)
    return Measured(
        error=error,
        bound=FP32,
        note=f"reported {reported:.6g}, {expected:.6g} from loss() and items",
    )


@TASKS.law("gradient")
def loss_is_fp32(lab: TaskLab) -> Measured:
    """The loss is a scalar in fp32, also under autocast to bf16."""
    model, batch = lab.build(), lab.data.train.batch(lab.rows(lab.data.train))
    with torch.autocast("cpu", torch.bfloat16):
        loss = lab.loss(model, batch)
    wrong = int(loss.dtype != torch.float32) + int(loss.dim() > 0) + int(not loss.requires_grad)
    note = (
        f"{loss.dtype}, shape {tuple(loss.shape)}, {'with' if loss.requires_grad else 'without'}"
        " gradient"
    )
    return Measured(error=wrong, bound=EXACT, note=note)


@TASKS.law("gradient")
def through_the_model(lab: TaskLab) -> Measured:
    """The loss reaches parameters through ``model(...)`` alone; a strategy sees no other way."""
    model = lab.build()
    batch = lab.data.train.batch(lab.rows(lab.data.train))
    launcher = Launcher(model)
    try:
        loss = lab.loss(launcher, batch)
    except AttributeError as error:
        return Measured(error=1, bound=EXACT, note=f"loss() asks for more than model(...): {error}")
    loss.backward()  # type: ignore[no-untyped-call]
    around = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    note = (
        f"parameters reached on another way: {', '.join(around[:3]) or 'none'}; calls of the model:"
        f" {launcher.calls}"
    )
    return Measured(error=len(around) + int(launcher.calls == 0), bound=EXACT, note=note)


@TASKS.law("evaluation")
def rows_alone(lab: TaskLab) -> Measured:
    """A row's outputs do not depend on other rows of its batch; sums are sums over rows."""
    model, rows = lab.build_moved(), lab.rows(lab.data.evaluation)
    together = lab.evaluate(model, lab.data.evaluation.batch(rows), len(rows))
    alone = [lab.evaluate(model, lab.data.evaluation.batch(row[None]), 1) for row in rows]
    worst, where = 0.0, "no outputs"
    for name, value in together.outputs.items():
        error = max(largest(value[i], one.outputs[name][0]) for i, one in enumerate(alone))
        worst, where = max((worst, where), (error, f"output {name!r}"))
    for name, total in together.sums.items():
        error = difference(total, torch.stack([one.sums[name] for one in alone]).sum(0)).relative
        worst, where = max((worst, where), (error, f"sum {name!r}"))
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
    changed = [
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    ]
    differing = [
        name for name in first.outputs if not same(first.outputs[name], second.outputs[name])
    ]
    differing += [
        name for name in first.sums if not torch.equal(first.sums[name], second.sums[name])
    ]
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
    model, rows = lab.task.build_model(lab.config, lab.data), lab.rows(lab.data.evaluation)
    batch = lab.data.evaluation.batch(rows)
    first = lab.evaluate(model, batch, len(rows))
    second = lab.evaluate(AlwaysTraining(model), batch, len(rows), model)
    differing = [
        name for name in first.outputs if not same(first.outputs[name], second.outputs[name])
    ]
    differing += [
        name for name in first.sums if not torch.equal(first.sums[name], second.sums[name])
    ]
    return none_of(differing, "outputs that differ: is `training` of a model read")


@TASKS.law("evaluation")
def metrics_are_there(lab: TaskLab) -> Measured:
    """The report has a number for every metric that the task declares, and the
    same names without rows.
    """
    few, collected = lab.evaluate_few(lab.build())
    metrics = lab.task.evaluation.metrics(collected, few.evaluation, few)
    declared = lab.task.declared_metrics
    missing = [name for name in declared if not isinstance(metrics.get(name), int | float)]
    missing += [
        name
        for name in declared
        if name not in lab.task.evaluation.metrics(Collected(), few.evaluation, few)
    ]
    return none_of(missing, "not there or no number")


@TASKS.law("evaluation")
def predictions_for_all_rows(lab: TaskLab) -> Measured:
    """``predictions`` gives one JSON object for each row."""
    needs(lab.task.predictions.are_written, "the task has no predictions()")
    few, collected = lab.evaluate_few(lab.build())
    lines, rows = len(list(lab.task.predictions.lines(collected.outputs, few))), len(few.evaluation)
    return Measured(error=abs(lines - rows), bound=EXACT, note=f"{lines} lines for {rows} rows")


@TASKS.law("checkpoint")
def same_weights_again(lab: TaskLab) -> Measured:
    """The same seed builds the same model, as it must on every rank."""
    one, other = lab.build().state_dict(), lab.build().state_dict()
    differing = [
        name for name in one if name not in other or not torch.equal(one[name], other[name])
    ]
    return none_of(differing, "tensors that differ")


@TASKS.law("checkpoint")
def same_weights_in_parts(lab: TaskLab) -> Measured:
    """A model whose weights are read or drawn in parts equals one that is built whole;
    so do frozen models.
    """
    config, task, data = lab.config, lab.task, lab.data
    sources = {"": model_source(config, task, data)}
    if task.has("frozen"):
        frozen = task.frozen(config, data)
        sources |= {
            f"frozen {name}: ": frozen_source(config, task, data, given)
            for name, given in frozen.items()
        }
    differing, reasons = list[str](), list[str]()
    for what, source in sources.items():
        if source.replay is None:
            reasons.append("nothing of it is read in parts")
            continue
        try:
            model, values = source.replay()
        except MetaModelError as reason:  # each rank builds it whole, then
            reasons.append(str(reason))
            continue
        differing += [f"{what}{name}" for name in differing_weights(model, values, source.build())]
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
        return Measured(
            error=1, bound=EXACT, note="reopen() does not know the folder that save() wrote"
        )
    mine, again = lab.build().state_dict(), lab.task.build_model(lab.config, data).state_dict()
    shapes, others = (
        {name: value.shape for name, value in state.items()} for state in (mine, again)
    )
    differing = sorted(
        name for name in shapes.keys() | others.keys() if shapes.get(name) != others.get(name)
    )
    return none_of(differing, "tensors that differ")


@TASKS.law("resume")
def rows_are_identified(lab: TaskLab) -> Measured:
    """The training rows have a digest of their content, so that a resume on others is refused."""
    content = content_of(lab.data.train)
    if content is None:
        raise Skip(
            "the training data has no `content`: a resume on other rows of the same lengths would"
            " not be seen"
        )
    return Measured(
        error=not (isinstance(content, str) and content),
        bound=EXACT,
        note=f"content {content!r:.20}",
    )


@TASKS.law("resume")
def options_survive(lab: TaskLab) -> Measured:
    """The options that config.yaml records build the same task again."""
    again = values_of(tasks.load_task(lab.config).task)
    differing = [
        name for name, value in lab.config.task_options.items() if again.get(name) != value
    ]
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
        why = (
            "build_model() needs values of tensors, so each rank builds it whole:"
            f" {type(error).__name__}"
        )
        raise Skip(why) from None
    real = lab.build().state_dict()
    differing = sorted(real.keys() ^ model.state_dict().keys())
    return none_of(differing, "tensors that differ")

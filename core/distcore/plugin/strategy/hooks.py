"""Typed wrappers of the hooks, with checked answers. No other module calls pluggy."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import pluggy
from torch import Tensor, nn
from torch.optim import Optimizer

from distcore.config import Clip, RunConfig
from distcore.errors import StrategyError
from distcore.hints import nearest
from distcore.plugin.batching.sampling import BatchPlan
from distcore.plugin.report import Report
from distcore.plugin.strategy import defaults
from distcore.plugin.strategy.capabilities import OLDEST_SPEC_VERSION, SPEC_VERSION, Capabilities
from distcore.plugin.strategy.contract import (
    BuiltModel,
    ComputesElsewhere,
    Evaluation,
    GathersWeights,
    MicroBatch,
    ModelSource,
    OptimizerFactory,
    PreparedModel,
    Progress,
    RankInfo,
    Run,
    Sampler,
    StepLoss,
    StepResult,
    World,
)
from distcore.plugin.strategy.extra_state import extra_state, extra_state_names, load_extra_state
from distcore.plugin.strategy.hookspecs import Events, Operations, hookimpl
from distcore.plugin.strategy.state import SavedState, State
from distcore.plugin.task.task import Batch, Datasets, Task

log = logging.getLogger("distcore")

T = TypeVar("T")
Passes = Callable[[Run, "list[tuple[MicroBatch, Batch]]", StepLoss], Tensor]
"""A function that runs the passes of a step, with arguments and answer of ``train_step``."""
OPERATIONS = tuple(name for name in vars(Operations) if not name.startswith("_"))
EVENTS = tuple(name for name in vars(Events) if not name.startswith("_"))

OWN_PASSES = "the loop's own train_step"
"""Name of the plugin with the loop's passes, which extensions wrap."""
OF_A_STEP = ("wrap_model", "train_step", "backward", "step")
"""Operations in which an extension can change what a step computes."""


class Hooks:
    """The hooks of one run, answered by one strategy and heard by its extensions.

    Methods have the names and arguments of the hooks, which ``distcore.plugin.strategy.hookspecs``
    documents. An answer of the wrong type raises StrategyError with the names of strategy and hook.
    """

    def __init__(
        self, name: str, strategy: object, extensions: Mapping[str, object] | None = None
    ) -> None:
        """Register ``strategy`` under ``name``, and ``extensions`` by their names.

        Raises StrategyError for a hook method without ``@hookimpl``, an unknown argument or another
        spec version.
        """
        self.name = name
        self._strategy = strategy
        self.capabilities = capabilities_of(name, strategy)
        self._manager = pluggy.PluginManager("distcore")
        self._manager.add_hookspecs(Operations)
        self._manager.add_hookspecs(Events)
        self._manager.register(_defaults_for_missing(strategy), "defaults")
        listeners = extensions or {}
        plugins = {f"extension {label!r}": instance for label, instance in listeners.items()}
        for label, instance in {f"strategy {name!r}": strategy, **plugins}.items():
            _check_marks(label, instance, may_answer=instance is strategy)
            try:
                self._manager.register(instance, label)
                self._manager.check_pending()
            except pluggy.PluginValidationError as error:
                raise StrategyError(f"{label}: {' '.join(str(error).split())}") from error
        _refuse_blind_wrappers(name, self.capabilities, plugins)
        self._wrappers = [
            label for label, instance in plugins.items() if hasattr(instance, "wrap_model")
        ]
        self.changers: list[str] = []
        """What extensions do that can make another step of it than one plain process makes."""
        self.unheard_changers: list[str] = []
        """What extensions do to passes that are no hook calls, as those under ``exact``."""
        for label, instance in plugins.items():
            if not getattr(instance, "only_looks", False):
                wrapped = [hook for hook in OF_A_STEP if _is_marked(getattr(instance, hook, None))]
                self.changers += [f"{label} wraps {hook}()" for hook in wrapped]
                if _is_marked(getattr(instance, "accumulate", None)):
                    self.unheard_changers.append(f"{label} wraps accumulate()")
        self._prepared = _Prepared()
        # Last, so that it is next to the strategy.
        self._manager.register(self._prepared, "what the strategy prepared")
        self._call = self._manager.hook
        self._keepers: dict[str, Any] = {
            label: listener
            for label, listener in listeners.items()
            if _keeps_state(label, listener)
        }
        self.logs = tuple(
            name for listener in listeners.values() for name in getattr(listener, "logs", ())
        )
        """Names that the extensions log."""
        # Looked up once, for hooks of every step: each call through pluggy costs microseconds.
        self._accumulate = self._shortest("accumulate")
        self._backward = self._shortest("backward")
        self._step = self._shortest("step")
        self._step_end = self._shortest("on_step_end")
        self._is_last = True
        self.before_backward: Callable[[Tensor, bool], None] | None = None
        """Gets the loss of each backward pass, and True for a step's last; in the first steps."""
        self.has_step_listener = bool(self._call.on_step_end.get_hookimpls())
        """True if anybody hears ``on_step_end``."""
        if _is_marked(getattr(strategy, "train_step", None)):
            _warn_of_unused_wrappers(name, plugins)

    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Call the hook; raises StrategyError unless it returns a World."""
        return self._checked("setup", World, self._call.setup(config=config, rank_info=rank_info))

    def build_model(self, config: RunConfig, world: World, source: ModelSource) -> BuiltModel:
        """Call the hook; StrategyError unless it returns a module, alone or in a BuiltModel."""
        answer = self._call.build_model(config=config, world=world, source=source)
        if isinstance(answer, BuiltModel):
            return answer
        return BuiltModel(model=self._checked("build_model", nn.Module, answer))

    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Call the hook; raises StrategyError unless it returns a PreparedModel.

        Also if a strategy that steps its own optimizer would not step the one returned.
        """
        answer = self._call.wrap_model(run=run, model=model, make_optimizer=make_optimizer)
        prepared = self._checked("wrap_model", PreparedModel, answer)
        is_replaced = prepared.optimizer is not self._prepared.optimizer
        if is_replaced and "optimizer" in self.capabilities.owns:
            raise StrategyError(
                f"{' or '.join(self._wrappers)}: replaced the optimizer in wrap_model(), but"
                f" strategy {self.name!r} steps its own; leave it, or take a strategy that does not"
                " own the optimizer (distcore strategies)"
            )
        return prepared

    def build_sampler(self, run: Run, plan: BatchPlan) -> Sampler:
        """Call the hook; raises StrategyError unless it returns a callable."""
        answer = self._call.build_sampler(run=run, plan=plan)
        if not callable(answer):
            self._refuse("build_sampler", "a callable (epoch, step) -> micro-batches", answer)
        return answer  # type: ignore[no-any-return]

    def passes_or(self, own: Passes) -> Passes:
        """Return the function for a step's passes: the strategy's ``train_step`` or ``own``.

        Extensions may wrap it.

        An unwrapped ``own`` is returned as it is, and costs no hook call.
        """
        if self._manager.has_plugin(OWN_PASSES):  # of an earlier run with these hooks
            self._manager.unregister(name=OWN_PASSES)
        implementations = self._call.train_step.get_hookimpls()
        if not implementations:
            return own
        if all(each.wrapper or each.hookwrapper for each in implementations):
            # pluggy reads the names of the arguments.
            train_step = hookimpl(lambda run, micros, loss: own(run, micros, loss))
            own_plugin = SimpleNamespace(train_step=train_step)
            self._manager.register(own_plugin, OWN_PASSES)
        return self.train_step

    def train_step(
        self, run: Run, micros: list[tuple[MicroBatch, Batch]], loss: StepLoss
    ) -> Tensor:
        """Call the hook; raises StrategyError unless it returns a tensor."""
        run.tally.enter("forward")
        answer = self._call.train_step(run=run, micros=micros, loss=loss)
        run.tally.enter("other")
        if not isinstance(answer, Tensor):
            self._refuse("train_step", "Tensor", answer)
        return answer

    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Call the hook; raises StrategyError if it returns ``None``."""
        run.tally.enter("forward")
        self._is_last = last
        answer = self._accumulate(run=run, last=last)
        if answer is None:
            self._refuse("accumulate", "a context manager", answer)
        return answer  # type: ignore[no-any-return]

    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Call the hook; raises StrategyError unless it returns a tensor."""
        if self.before_backward is not None:
            self.before_backward(loss, self._is_last)
        run.tally.enter("backward")
        answer = self._backward(run=run, loss=loss)
        run.tally.enter("other")
        # Not by _checked, here and in step(): these run in every step, and a call less
        # is time saved.
        return answer if isinstance(answer, Tensor) else self._refuse("backward", "Tensor", answer)

    def step(self, run: Run, clip: Clip) -> StepResult:
        """Call the hook; raises StrategyError unless it returns a StepResult."""
        run.tally.enter("step")
        answer = self._step(run=run, clip=clip)
        run.tally.enter("other")
        if not isinstance(answer, StepResult):
            self._refuse("step", "StepResult", answer)
        return answer

    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        """Call the hook; StrategyError unless it returns a tensor of the shape of ``values``."""
        summed = self._call.reduce_loss(run=run, values=values)
        answer = self._checked("reduce_loss", Tensor, summed)
        if answer.shape != values.shape:
            expected = f"a tensor of shape {tuple(values.shape)}"
            self._refuse("reduce_loss", expected, tuple(answer.shape))
        return answer

    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Call the hook; StrategyError unless it returns a dict with the keys of ``outputs``."""
        gathered = self._call.gather_outputs(run=run, outputs=outputs)
        answer = self._checked("gather_outputs", dict, gathered)
        if answer.keys() != outputs.keys():
            self._refuse("gather_outputs", f"tensors {sorted(outputs)}", sorted(answer))
        return answer

    def computed_weights(self, run: Run) -> State:
        """Return the weights with which the strategy's model computes, by name.

        Empty where it computes with those of the module.
        """
        if isinstance(self._strategy, ComputesElsewhere):
            return self._strategy.computed_weights(run)
        return {}

    def gathering_modules(self, run: Run) -> Mapping[str, nn.Module]:
        """Return, by name, the modules at whose calls the strategy gathers weights from
        other ranks.
        """
        if not isinstance(self._strategy, GathersWeights):
            return {}
        return self._strategy.gathering_modules(run)

    def save_checkpoint(self, run: Run) -> State:
        """Call the hook; add the modules' extra state. StrategyError unless it returns a dict."""
        state = self._checked("save_checkpoint", dict, self._call.save_checkpoint(run=run))
        extra = {f"model/{name}": value for name, value in extra_state(run.module).items()}
        return state | extra

    def load_checkpoint(self, run: Run, state: SavedState, progress: Progress) -> None:
        """Call the hook; load the modules' extra state. StrategyError unless it returns a bool."""
        answer = self._call.load_checkpoint(run=run, state=state, progress=progress)
        self._checked("load_checkpoint", bool, answer)
        names = [name for name in extra_state_names(run.module) if f"model/{name}" in state]
        load_extra_state(run.module, {name: state[f"model/{name}"] for name in names})

    def teardown(self, world: World) -> None:
        """Call the hook; raises StrategyError unless it returns a bool."""
        self._checked("teardown", bool, self._call.teardown(world=world))

    def on_run_start(self, run: Run, progress: Progress, task: Task, data: Datasets) -> None:
        """Tell all listeners that training is about to start."""
        self._tell("on_run_start", run, progress=progress, task=task, data=data)

    def on_epoch_start(self, run: Run, progress: Progress) -> None:
        """Tell all listeners that an epoch begins."""
        self._tell("on_epoch_start", run, progress=progress)

    def on_step_end(self, run: Run, progress: Progress, result: StepResult) -> None:
        """Tell all listeners that an optimizer step is done."""
        if not self.has_step_listener:
            return
        answers = self._step_end(run=run, progress=progress, result=result)
        if answers:
            # A single listener is called directly, and its answer is no list.
            all_answers = answers if isinstance(answers, list) else [answers]
            run.tally.add_requests("on_step_end", all_answers)

    def on_epoch_end(self, run: Run, progress: Progress) -> None:
        """Tell all listeners that an epoch is done."""
        self._tell("on_epoch_end", run, progress=progress)

    def on_log(self, run: Run, record: dict[str, float]) -> None:
        """Give all listeners the logged values."""
        self._tell("on_log", run, record=record)

    def on_evaluation_end(self, run: Run, progress: Progress, evaluation: Evaluation) -> None:
        """Tell all listeners that an evaluation is done."""
        self._tell("on_evaluation_end", run, progress=progress, evaluation=evaluation)

    def on_checkpoint(self, run: Run, progress: Progress, path: Path) -> None:
        """Tell all listeners that a checkpoint is committed."""
        self._tell("on_checkpoint", run, progress=progress, path=path)

    def on_run_end(self, run: Run, report: Report) -> None:
        """Tell all listeners that the run is over."""
        self._call.on_run_end(run=run, report=report)

    def states(self) -> dict[str, object]:
        """Return the listeners' states for a checkpoint, by name.

        Raises StrategyError unless they are JSON values.
        """
        states = {label: keeper.state() for label, keeper in self._keepers.items()}
        for label, state in states.items():
            try:
                json.dumps(state, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise StrategyError(f"{label}: state() returned no JSON value: {error}") from None
        return states

    def load_states(self, states: Mapping[str, object]) -> None:
        """Restore the listeners' states; a listener without a saved state begins anew."""
        for label in self._keepers.keys() & states.keys():
            self._keepers[label].load_state(states[label])

    def _tell(self, event: str, run: Run, **values: object) -> None:
        """Call all listeners of an event, and note what they request."""
        tell_listeners = getattr(self._call, event)
        answers = tell_listeners(run=run, **values)
        run.tally.add_requests(event, answers)

    def _shortest(self, hook: str) -> Callable[..., Any]:
        """Return the shortest call of a hook: of its functions themselves, without pluggy.

        pluggy's own where an implementation is a wrapper, or takes fewer arguments.
        """
        caller = getattr(self._call, hook)
        implementations = caller.get_hookimpls()[::-1]
        if not implementations:
            return caller  # type: ignore[no-any-return]
        for implementation in implementations:
            is_wrapper = implementation.wrapper or implementation.hookwrapper
            if is_wrapper or implementation.argnames != caller.spec.argnames:
                return caller  # type: ignore[no-any-return]
        functions = [implementation.function for implementation in implementations]
        if len(functions) == 1:
            return functions[0]  # type: ignore[no-any-return]
        return lambda **values: [function(**values) for function in functions]

    def _checked(self, hook: str, kind: type[T], answer: Any) -> T:
        return answer if isinstance(answer, kind) else self._refuse(hook, kind.__name__, answer)

    def _refuse(self, hook: str, expected: str, answer: object) -> NoReturn:
        """Raise StrategyError for the answer of a hook."""
        got = repr(answer) if isinstance(answer, (tuple, list)) else type(answer).__name__
        raise StrategyError(
            f"strategy {self.name!r}, hook {hook}(): returned {got}, not {expected}"
        )


class _Prepared:
    """Notes the optimizer that the strategy returned: the innermost wrapper, before extensions."""

    optimizer: Optimizer | None = None

    @hookimpl(wrapper=True, trylast=True)
    def wrap_model(self) -> Generator[None, Any, Any]:
        answer = yield
        self.optimizer = getattr(answer, "optimizer", None)
        return answer


def capabilities_of(name: str, strategy: object) -> Capabilities:
    """Return the capabilities of ``strategy``; StrategyError if it has none of a known version."""
    declared = getattr(strategy, "capabilities", None)
    if not isinstance(declared, Capabilities):
        raise StrategyError(
            f"strategy {name!r}: declares no capabilities; set `capabilities = Capabilities(…)`"
        )
    if not OLDEST_SPEC_VERSION <= declared.spec_version <= SPEC_VERSION:
        remedy = "upgrade distcore"
        if declared.spec_version < SPEC_VERSION:
            remedy = "upgrade the plugin, or see docs/compatibility.md"
        raise StrategyError(
            f"strategy {name!r}: written for hook-spec version {declared.spec_version}, this"
            f" distcore has {SPEC_VERSION} and takes {OLDEST_SPEC_VERSION} too; {remedy}"
        )
    return declared


def _refuse_blind_wrappers(
    name: str, capabilities: Capabilities, extensions: Mapping[str, object]
) -> None:
    """Raise StrategyError for an extension that may want to change gradients that are hidden."""
    if not capabilities.hides_gradients:
        return
    for label, instance in extensions.items():
        wraps_step = _is_marked(getattr(instance, "step", None))
        if wraps_step and not getattr(instance, "only_looks", False):
            raise StrategyError(
                f"{label} wraps step(), and strategy {name!r} with these options has no gradients"
                " there that it could change: take another strategy, or, if it only looks, let its"
                " class say only_looks = True"
            )


def _warn_of_unused_wrappers(name: str, extensions: Mapping[str, object]) -> None:
    """Log extensions that wrap hooks which the strategy's own ``train_step`` does not call."""
    for label, instance in extensions.items():
        unused = [
            hook for hook in ("accumulate", "backward") if _is_marked(getattr(instance, hook, None))
        ]
        if unused and not _is_marked(getattr(instance, "train_step", None)):
            hooks = " and ".join(f"{hook}()" for hook in unused)
            log.warning(
                "%s wraps %s, which strategy %r does not call: it answers train_step()",
                label,
                hooks,
                name,
            )


def _defaults_for_missing(strategy: object) -> SimpleNamespace:
    """Return an object with the default of each operation that ``strategy`` lacks, and no others.

    Were all defaults registered, pluggy would call one whenever the strategy answers ``None`` by
    mistake.
    """
    functions = {}
    for name in OPERATIONS:
        is_missing = not _is_marked(getattr(strategy, name, None))
        if is_missing and hasattr(defaults, name):
            functions[name] = hookimpl(getattr(defaults, name))
    return SimpleNamespace(**functions)


def _keeps_state(label: str, listener: object) -> bool:
    """Return True if a listener has a state; StrategyError if it has one of its two methods."""
    has = [callable(getattr(listener, name, None)) for name in ("state", "load_state")]
    if any(has) and not all(has):
        raise StrategyError(
            f"{label}: has one of state() and load_state(); a checkpoint needs both"
        )
    return all(has)


def _is_marked(method: Callable[..., object] | None) -> bool:
    return getattr(method, "distcore_impl", None) is not None


def _check_marks(label: str, instance: object, may_answer: bool) -> None:
    """Raise StrategyError for mistakes that pluggy ignores.

    The mistakes are an unmarked hook method, a marked method that is no hook, and an extension that
    answers an operation instead of the strategy (``may_answer`` is False).
    """
    hooks = (*OPERATIONS, *EVENTS)
    # Methods of a task come in a namespace.
    owner = instance if isinstance(instance, SimpleNamespace) else type(instance)
    for name, method in inspect.getmembers(owner, callable):
        mark = getattr(method, "distcore_impl", None)
        if name in hooks and mark is None:
            raise StrategyError(
                f"{label}: {name}() has no @hookimpl mark and would never be called"
            )
        if mark is not None and name not in hooks:
            raise StrategyError(
                f"{label}: {name}() is marked @hookimpl but is no hook{nearest(name, hooks)}"
            )
        if mark is not None:
            _check_arguments(label, name, method)
        replaces = mark is not None and not mark["wrapper"]
        if name in OPERATIONS and replaces and not may_answer:
            raise StrategyError(
                f"{label}: {name}() would replace the strategy's; mark it @hookimpl(wrapper=True)"
            )


def _check_arguments(label: str, name: str, method: Callable[..., object]) -> None:
    """Raise StrategyError for a required argument that the hook does not have."""
    spec = getattr(Operations, name, None) or getattr(Events, name)
    arguments = inspect.signature(spec).parameters
    for argument, parameter in inspect.signature(method).parameters.items():
        if argument not in arguments and parameter.default is parameter.empty:
            has = f"the hook has {', '.join([*arguments][1:])}"  # without self
            raise StrategyError(
                f"{label}: {name}() takes {argument!r}{nearest(argument, arguments)}; {has}"
            )

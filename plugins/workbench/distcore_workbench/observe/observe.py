"""Figures of a run in every log line: real tokens and operations by second, time by phase,
memory of every rank.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from torch import Tensor

from distcore import (
    BatchPlan,
    BuiltModel,
    Capabilities,
    ConfigError,
    Datasets,
    ModelSource,
    Progress,
    RankInfo,
    Run,
    RunConfig,
    Sampler,
    State,
    StepResult,
    Task,
    hookimpl,
)
from distcore.distributed import peak_memory
from distcore.rank_environment import join
from distcore_workbench.observe.clock import PhaseClock, clock_of
from distcore_workbench.observe.goodput import goodput_of
from distcore_workbench.observe.peaks import peak_of
from distcore_workbench.observe.phases import PHASES, TRAINING
from distcore_workbench.observe.slots import Slots
from distcore_workbench.observe.stragglers import PARTS, Stragglers, spread_of
from distcore_workbench.observe.times import TimesFile
from distcore_workbench.observe.tokens import Work

log = logging.getLogger("distcore")
TIMED = (*TRAINING, "evaluation", "save")
"""Phases in a log line; a run's start is over before its first."""
EVALUATES = ("longest-first", "sequential")
"""Orders of rows of an evaluation."""
PATIENCE = 60.0
"""Seconds of training before the model's operations are counted, which takes some: a short run pays
nothing for it. A run of one attempt that is shorter prints no goodput line either.
"""


@dataclass
class Observe:
    """Add figures of speed, time and memory to every log line; each covers the steps
    since the line before.

    - ``tokens_per_second``: real tokens of all ranks, without padding; not for rows without
      tokens, such as images.
    - ``model_flops``: operations of a step, mean, forward and backward. They are counted once,
      after a minute of
      training, or at its start if ``peak_tflops`` is given: on tensors without values, for the
          shortest, a middle and
      the longest row. A polynomial through the three gives the others, exactly for a
      transformer. Matrix products and convolutions count, two operations for each multiplication.
      Attention counts over the whole row, packed or causal too. Recomputation and gradients of
      frozen weights do not count.
    - ``mfu``: the model FLOPs per second, divided by the peak of all devices.
      Sources are in ``observe/peaks.json``.
    - ``data_seconds``, ``forward_seconds``, ``backward_seconds``,
      ``step_seconds`` (the optimizer's), ``log_seconds``,
      ``other_seconds``, ``evaluation_seconds``, ``save_seconds``: mean over ranks of the
          time in each phase.
      Communication is part of the phase that waits for it; ``--profile`` tells it apart.
    - ``peak_memory_max_bytes`` and ``peak_memory_max_rank``: the highest peak of all ranks so far,
      and whose it is.

    ``times.jsonl`` keeps these times for each attempt, a start of the run's ranks. From it the end
    of a run and ``distcore report`` say where the time went. Waiting is how much longer the slowest
    rank needed than the mean for data, forward passes and backward passes that are not a step's
    last; ranks that wait in their forward passes, as under ``fsdp``, count less. Lost is what a
    later attempt did again.

    A warning names a rank that is slow: whose data, forward passes and backward passes before the
    last of a step take 10 % and 2 ms longer than the median of all ranks, over 30 steps, or over
    150 where its steps vary. On Linux the time does not count in which another process has the
    rank's core. A rank is named again after it was no slower.
    Under ``fsdp`` ranks wait in their forward passes, and where several share a row each has other
    work: there no rank is named.

    What ranks tell each other goes with the loss: there is no further communication. On an
    accelerator the phases are timed in the device's queue, and no step waits for the device.
    """

    peak_tflops: float | None = None
    """TFLOP/s of the device of a rank in the run's precision, for MFU; null: by
    a table of devices.
    """

    def __post_init__(self) -> None:
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise ConfigError(
                f"extensions.observe.peak_tflops = {self.peak_tflops}: must be above 0"
            )
        # Not that of the process, which may be an old one, such as a notebook's.
        self._began = time.time()
        self._slots = Slots((join(os.environ) or RankInfo()).size)
        self.logs = (*(f"{phase}_seconds" for phase in TIMED), *self._slots.names)
        """Names of the sums that ranks send."""
        self._source: ModelSource | None = None
        self._clock: PhaseClock | None = None
        self._times: TimesFile | None = None
        self._sent = dict.fromkeys(PHASES, 0.0)
        self._stragglers = Stragglers()
        self._slow: list[str] = []
        self._waited = 0.0
        self._count: Callable[[], None] | None = None
        self._began_training = 0.0
        self._compared = 0
        self._progress = Progress()
        self._has_stepped = False
        self._enter: Callable[[str], None] = _ignore

    @hookimpl(wrapper=True)
    def build_model(self, source: ModelSource) -> Generator[None, BuiltModel, BuiltModel]:
        """Remember how the trained model, the first one, is built."""
        self._source = self._source or source
        return (yield)

    @hookimpl(trylast=True)
    def on_run_start(self, run: Run, progress: Progress, task: Task, data: Datasets) -> None:
        """Start the clock."""
        given = (
            peak_of(run.world.device, run.config)
            if self.peak_tflops is None
            else self.peak_tflops * 1e12
        )
        self._peak = given and given * run.world.size
        self._work, self._progress, self._compared = Work(progress), progress, progress.step
        self._out = Path(str(run.config.out))
        if run.world.is_main:
            self._times = TimesFile(self._out, progress.step, self._began)
        if run.world.is_main and (source := self._source) is not None:
            # not the run, which ends before its extensions
            config, capabilities = run.config, run.capabilities
            self._count = lambda: self._count_flops(config, capabilities, source, task, data)
        if self.peak_tflops is not None:
            self._count_after(0.0)
        already, self._began_training = time.time() - self._began, perf_counter()
        self._clock = clock_of(run.world.device, already, run.world.size)
        self._enter = run.tally.enter = self._clock.enter

    @hookimpl(wrapper=True)
    def build_sampler(self, plan: BatchPlan) -> Generator[None, Sampler, Sampler]:
        """Training begins, or an evaluation; those before the first step are checks, and
        part of the start.
        """
        if self._clock is not None and plan.order not in EVALUATES:
            self._work.plan = plan
        elif self._clock is not None and self._has_stepped:
            self._clock.enter("evaluation")
        return (yield)

    @hookimpl(trylast=True)
    def on_step_end(self, run: Run, progress: Progress, result: StepResult) -> None:
        """Count the step; before a log line, add what this rank sends with the loss."""
        self._progress, self._has_stepped = progress, True
        if self._clock is None:
            return
        self._clock.end_step()
        if progress.step == run.total_steps or progress.step % run.config.log_every == 0:
            self._send(run, self._clock)
        self._clock.enter("data")

    # Wrappers with tryfirst are the outermost: what other plugins do in a hook counts as part
    # of its phase.
    @hookimpl(wrapper=True, tryfirst=True)
    def reduce_loss(self) -> Generator[None, Tensor, Tensor]:
        """Time what belongs to a log line."""
        self._enter("log")
        return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def on_log(
        self, run: Run, record: dict[str, float]
    ) -> Generator[None, list[object], list[object]]:
        """Replace what each rank sent by figures, before others see the log line."""
        self._slots.read(record)
        if run.world.is_main:
            peaks = {rank: sent["peak_memory"] for rank, sent in self._slots.values.items()}
            rank = max(peaks, key=lambda candidate: peaks[candidate])
            if self._progress.step < run.total_steps:
                # an evaluation, which the speed leaves out, comes first
                self._count_after(2 * PATIENCE)
            record |= self._work.figures(self._progress, record["samples_per_second"], self._peak)
            record |= {"peak_memory_max_bytes": peaks[rank], "peak_memory_max_rank": rank}
            # each sent of the steps since its last turn
            self._waited += waited(self._slots.news) / self._slots.turns
            self._name_stragglers(run)
            self._note("log")
        answers = yield
        self._enter("data")
        return answers

    @hookimpl(wrapper=True, tryfirst=True)
    def on_evaluation_end(self, run: Run) -> Generator[None, list[object], list[object]]:
        """End an evaluation."""
        answers = yield
        if self._progress.step < run.total_steps:
            self._count_after(PATIENCE)
        self._enter("data")
        self._note("evaluation")
        return answers

    @hookimpl(wrapper=True, tryfirst=True)
    def save_checkpoint(self, run: Run) -> Generator[None, State, State]:
        """Begin a save; a moving average reads the weights by this hook,
        too, without an optimizer.
        """
        if run.optimizer is not None:
            self._note("saving")
            self._enter("save")
        return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def on_checkpoint(self) -> Generator[None, list[object], list[object]]:
        """Time the hooks of others after a save.

        While a save is written in the background, the run is in other phases.
        """
        self._enter("save")
        answers = yield
        self._enter("data")
        self._note("checkpoint")
        return answers

    @hookimpl(wrapper=True, tryfirst=True)
    def teardown(self) -> Generator[None, bool, bool]:
        """Say where the time went, of all attempts in this run folder, if it was
        more than a moment.
        """
        answer = yield
        if self._times is not None:
            self._note("end")
            goodput = goodput_of(self._out)
            if goodput is not None and (goodput.attempts > 1 or goodput.clock > PATIENCE):
                log.info("%s", goodput)
        return answer

    def _note(self, event: str) -> None:
        """Add a line to times.jsonl, on the main rank."""
        if self._times is not None and self._clock is not None:
            values = {"seconds": self._clock.seconds(), "waited": self._waited}
            ranks = {"ranks": self._slots.news, "slow": self._slow} if event == "log" else {}
            self._times.add(event, self._progress.step, values=values | ranks)

    def _count_after(self, seconds: float) -> None:
        """Count the operations of the model, once, on the main rank.

        It waits until training began ``seconds`` ago.
        """
        if self._count is not None and (
            not seconds or perf_counter() - self._began_training > seconds
        ):
            count, self._count = self._count, None
            count()

    def _count_flops(
        self,
        config: RunConfig,
        capabilities: Capabilities,
        source: ModelSource,
        task: Task,
        data: Datasets,
    ) -> None:
        """Count the operations of rows; the time that it takes counts as starting."""
        # Late: it takes a second, which a short run need not wait for.
        from distcore_workbench.observe.flops import count_flops

        phase = self._clock.phase if self._clock else "starting"
        self._enter("starting")
        self._work.flops = count_flops(config, capabilities, source, task, data)
        self._enter(phase)

    def _send(self, run: Run, clock: PhaseClock) -> None:
        """Add this rank's seconds since the last log line, and its memory, to what the
        loss is sent with.
        """
        seconds = clock.seconds()
        for phase in TIMED:
            run.log(f"{phase}_seconds", seconds[phase] - self._sent[phase])
        self._sent = seconds
        if self._slots.is_turn_of(run.world.rank):
            steps = clock.steps()
            sent = {
                "data": median(step.data for step in steps),
                "compute": median(step.compute for step in steps),
                "spread": spread_of([step.data + step.compute for step in steps]),
                # Others wait, too, while another process has the core.
                "data_of_all": sum(step.data + step.data_taken for step in steps),
                "compute_of_all": sum(step.compute + step.compute_taken for step in steps),
            }
            self._slots.send(run, sent | {"peak_memory": peak_memory(run.world.device)})

    def _name_stragglers(self, run: Run) -> None:
        """Warn of ranks that are slower than the others; where ranks share a row, each has
        work of its own.
        """
        steps, self._compared = self._progress.step - self._compared, self._progress.step
        if run.world.shards == run.world.size:
            self._slow = self._stragglers.add(self._slots.news, steps)
            for line in self._slow:
                log.warning("observe: %s", line)


def waited(ranks: Mapping[int, Mapping[str, float]]) -> float:
    """Return the seconds that ranks waited for the slowest one, mean over ranks, by
    what each did alone.
    """
    alone = [sum(sent[f"{part}_of_all"] for part in PARTS) for sent in ranks.values()]
    return max(alone) - sum(alone) / len(alone)


def _ignore(_phase: str) -> None:
    """Time nothing: the run has not begun to train."""

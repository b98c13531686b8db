"""Record a run with MLflow."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from distcore import Progress, Run, dump_config
from distcore.lab import flatten
from distcore_trackers.tracking import Tracker, flat

if TYPE_CHECKING:
    from mlflow import MlflowClient

SETTINGS = {
    # Without it MLflow refuses a folder, and asks for a database.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    # By default MLflow tries for minutes, in which the other ranks wait.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Environment variables of MLflow, unless they are set."""
LONGEST_PARAM = 6000
"""Characters of a parameter that MLflow takes."""
LONGEST_NAME = 250
"""Characters of a name that MLflow takes."""


@dataclass
class MLflow(Tracker):
    """Record a run with MLflow, from the main rank: by default in files in the run folder.

    Metrics are every logged value (``train/NAME``), every metric of an evaluation (``eval/NAME``)
    and of the final test (``test/NAME``), by the optimizer step; parameters are the config; tags
    are the paths of checkpoints and the model card. A resumed run continues the same run of MLflow,
    and has each step once. One that begins anew, as after a kill before its first checkpoint,
    deletes that run, which MLflow can restore, and makes another.
    """

    name: ClassVar[str] = "mlflow"
    library: ClassVar[str] = "mlflow"

    experiment: str = "distcore"
    """Experiment of the run, made if it is missing. The run is named after the run folder."""

    uri: str | None = None
    """Address of a server, or a folder relative to the run folder.

    None: MLFLOW_TRACKING_URI, else ``mlflow``.
    """

    def open(self, run: Run, progress: Progress, known: str | None) -> str:
        """Begin a run of MLflow, or go on with one, and give it the config."""
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        out = Path(str(run.config.out)).absolute()
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlflow"
        is_address = "://" in uri or uri == "databricks"
        address = uri if is_address else (out / uri).as_uri()
        self._client: MlflowClient = MlflowClient(address)
        resumed_id = known
        # Neither metrics nor parameters of the attempt before can be changed.
        if resumed_id and not progress.step:
            self._delete(resumed_id)
            resumed_id = None
        self._steps_before: dict[str, set[int]] | None = {} if resumed_id else None
        self._id = resumed_id or self._new_run(out.name)
        recorded = self._client.get_run(self._id).data.params
        # A dict first: MLflow refuses a batch in which two keys have become one name.
        params: dict[str, str] = {}
        for key, value in flat(flatten(run.config.model_dump(mode="json"))).items():
            params[_name_for_mlflow(key)] = value[:LONGEST_PARAM]
        # MLflow refuses another value of a recorded parameter.
        new = [Param(name, value) for name, value in params.items() if name not in recorded]
        self._client.log_batch(self._id, params=new)
        self._client.log_text(self._id, dump_config(run.config), "config.yaml")
        self._client.update_run(self._id, status="RUNNING")
        return self._id

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics; skip those that were logged for the step before a resume."""
        from mlflow.entities import Metric

        milliseconds = int(time.time() * 1e3)
        named = {_name_for_mlflow(name): value for name, value in values.items()}
        new = []
        for name, value in named.items():
            # MLflow appends: the steps after the checkpoint would appear twice.
            if step not in self._steps_of(name):
                new.append(Metric(name, value, milliseconds, step))
        self._client.log_batch(self._id, metrics=new)

    def text(self, name: str, value: str, step: int) -> None:
        """Set a tag."""
        self._client.set_tag(self._id, name, value)

    def close(self, finished: bool) -> None:
        """Record how the run ended."""
        self._client.set_terminated(self._id, status="FINISHED" if finished else "KILLED")

    def _delete(self, run: str) -> None:
        """Delete a run of MLflow, if it is still there."""
        from mlflow.exceptions import MlflowException

        with contextlib.suppress(MlflowException):
            self._client.delete_run(run)

    def _new_run(self, name: str) -> str:
        """Make a run in the experiment, which is made if it is missing; return the run's id."""
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment:
            identifier = experiment.experiment_id
        else:
            identifier = self._client.create_experiment(self.experiment)
        return str(self._client.create_run(identifier, run_name=name).info.run_id)

    def _steps_of(self, metric: str) -> set[int]:
        """Return the steps of a metric that were logged before this run was resumed."""
        if self._steps_before is None:
            return set()
        # One query a metric, not one a step: each is a request to the server.
        if metric not in self._steps_before:
            history = self._client.get_metric_history(self._id, metric)
            self._steps_before[metric] = {point.step for point in history}
        return self._steps_before[metric]


def _name_for_mlflow(name: str) -> str:
    """Return a name that MLflow takes: it refuses most punctuation, ``a//b`` and ``a/../b``.

    One name that it refuses would end the whole record, with the losses of all later steps.
    """
    parts = re.sub(r"[^\w\-. /]", "_", name).split("/")
    accepted = []
    for part in parts:
        if part in (".", ".."):
            accepted.append("_" * len(part))
        elif part:
            accepted.append(part)
    return "/".join(accepted)[:LONGEST_NAME]

"""``trials.jsonl``: the job in its first line, then a line for each trial, as it happens. A tune
goes on from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distcore import ConfigError
from distcore.files import strict_json
from distcore_workbench.tuning.outcome import Kind, Outcome
from distcore_workbench.tuning.settings import Setting, setting_key

FILE = "trials.jsonl"
VERSION = 2
"""Of the format of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One line of the file."""

    kind: Kind
    """The purpose of the trial."""
    setting: Setting
    """The setting."""
    number: int
    """Number of the repetition, from 1 in the finals."""
    steps: int
    """Steps that were timed or were to be; 0 where nothing was started."""
    outcome: Outcome
    """The outcome."""


@dataclass
class Record:
    """The trials so far, and the file that has them."""

    file: Path
    """Where they are kept."""
    trials: list[Trial] = field(default_factory=list)
    """In the order of running."""

    def find(self, kind: Kind, setting: Setting, number: int) -> Trial | None:
        """Return the trial that is there already."""
        wanted = (kind, setting_key(setting), number)
        return next(
            (
                trial
                for trial in self.trials
                if (trial.kind, setting_key(trial.setting), trial.number) == wanted
            ),
            None,
        )

    def add(self, trial: Trial) -> None:
        """Add a trial, to the file, too."""
        self.trials.append(trial)
        with self.file.open("a", encoding="utf-8") as out:
            out.write(strict_json(asdict(trial)) + "\n")


def open_record(out: Path, job: Mapping[str, Any]) -> Record:
    """Open the record of this ``job`` in ``out``, or begin one.

    ``job`` has values by dotted key. Raises ConfigError, one line, if the folder holds anything
    else, or another job's trials.
    """
    file = out / FILE
    try:
        if not file.exists():
            _begin(file, job)
            return Record(file)
        head, *lines = file.read_text(encoding="utf-8").splitlines() or [""]
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    try:
        recorded = json.loads(head)
        if recorded["version"] != VERSION:
            raise ConfigError(
                f"--out {out}: {FILE} is of another version of distcore; choose another folder"
            )
        # Through JSON as the record was: a tuple is a list there.
        job_as_json = json.loads(strict_json(dict(job)))
        _check_same(out, recorded["job"], job_as_json)
        return Record(file, _trials(file, head, lines))
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"--out {out}: {FILE} is damaged; choose another folder") from None


def _begin(file: Path, job: Mapping[str, Any]) -> None:
    """Write the first line of a record into a new or an empty folder. Raises ConfigError."""
    out = file.parent
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: is a file, or holds something else; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    head = strict_json({"version": VERSION, "job": dict(job)})
    file.write_text(f"{head}\n", encoding="utf-8")


def _check_same(out: Path, recorded: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    """Raise ConfigError, one line, for the first key in which the recorded job differs."""
    for key in dict.fromkeys((*job, *recorded)):
        if job.get(key) != recorded.get(key):
            raise ConfigError(
                f"--out {out}: holds the trials of another job: {key} = {recorded.get(key)!r}"
                f" there, now {job.get(key)!r}; choose another folder"
            )


def _trials(file: Path, head: str, lines: list[str]) -> list[Trial]:
    """Return the trials of the lines; remove a last line whose writer was killed half way."""
    trials = []
    for number, line in enumerate(lines):
        try:
            tree = json.loads(line)
        except ValueError:
            if number < len(lines) - 1:
                raise
            # Else the next trial would be appended to it.
            whole_lines = "\n".join([head, *lines[:-1]])
            file.write_text(f"{whole_lines}\n", encoding="utf-8")
            break
        outcome: dict[str, Any] = {}
        for key, value in tree["outcome"].items():
            outcome[key] = tuple(value) if isinstance(value, list) else value
        trials.append(Trial(**tree | {"outcome": Outcome(**outcome)}))
    return trials

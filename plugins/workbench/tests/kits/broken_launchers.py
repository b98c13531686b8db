"""Launchers that are broken on purpose; a class names the case that must notice."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from distcore import ConfigError
from distcore.launchers import Command, LaunchPlan, LaunchSpec, only_host, rank_variables, refuse


class Sound:
    """Starts ranks here, by distcore's own supervisor, and keeps every law."""

    case: ClassVar = ""

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        refuse("sound", {"value": spec.value, "--nodes": spec.nodes}, "leave it out")
        only_host("sound", spec)
        words = (
            spec.here.python,
            "-m",
            "distcore",
            "train",
            *spec.train,
            "--nproc",
            str(spec.nproc),
        )
        return LaunchPlan(commands=(Command(words=words, environment=rank_variables(spec)),))

    def run(self, plan: LaunchPlan) -> int:
        (command,) = plan.commands
        return subprocess.run(
            command.words, env={**os.environ, **command.environment}, check=False
        ).returncode


class JustTheWords(Sound):
    case = "answers-a-plan"

    def plan(self, spec: LaunchSpec) -> Any:
        return super().plan(spec).commands[0].words


class Numbers(Sound):
    case = "answers-a-plan"

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        (command,) = super().plan(spec).commands
        words: Any = (*command.words[:-1], spec.nproc)
        return LaunchPlan(commands=(replace(command, words=words),))


class ThroughAShell(Sound):
    case = "every-argument"

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        (command,) = super().plan(spec).commands
        return LaunchPlan(
            commands=(replace(command, words=("bash", "-c", " ".join(command.words))),)
        )


class NoVariables(Sound):
    case = "every-variable"

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        (command,) = super().plan(spec).commands
        return LaunchPlan(commands=(replace(command, environment={}),))


class UnquotedVariables(Sound):
    case = "every-variable"

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        (command,) = super().plan(spec).commands
        settings = " ".join(f"{name}={value}" for name, value in spec.environment.items())
        return LaunchPlan(
            commands=(Command(words=("bash", "-c", f"env {settings} {shlex.join(command.words)}")),)
        )


class IgnoresNodes(Sound):
    case = "nothing-is-ignored"

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        return super().plan(replace(spec, nodes=None))


class IgnoresLogs(Sound):
    case = "nothing-is-ignored"

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        return super().plan(replace(spec, log_dir=None))


class OwnError(Sound):
    case = "refuses-in-one-line"

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        if spec.value:
            int(spec.value)
        return super().plan(replace(spec, value=""))


class NamesNoFlag(Sound):
    case = "refuses-in-one-line"

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        if spec.nodes:
            raise ConfigError("no other machines")
        return super().plan(spec)


class AllVariables(Sound):
    case = "same-plan-again"

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        return super().plan(replace(spec, environment={**os.environ, **spec.environment}))


class FolderOfTheProcess(Sound):
    case = "same-plan-again"

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        return super().plan(replace(spec, train=(*spec.train, "--out", os.getcwd())))


class WritesInPlan(Sound):
    case = "plans-only"

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        Path(spec.here.folder, "job.sh").write_text("")
        return super().plan(spec)


class OneRank(Sound):
    case = "starts-ranks"

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        return super().plan(replace(spec, nproc=1))


class AlwaysWell(Sound):
    case = "says-that-ranks-failed"

    def run(self, plan: LaunchPlan) -> int:
        super().run(plan)
        return 0

"""Build Horovod for the installed torch, once per machine, and install it into this environment.

``python -m distcore_horovod.build`` does the same as ``distcore-horovod build``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from distcore import StrategyError
from distcore_data import cached_folder
from distcore_horovod import recipe
from distcore_horovod.build_status import BuildStatus

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0 done, 2 after an error of one line."""
    parser = argparse.ArgumentParser(
        prog="distcore-horovod build",
        description=(
            f"Build {recipe.RELEASE} for the installed torch (some minutes; cached), install it,"
            " and check it."
        ),
    )
    parser.add_argument(
        "--if-missing", action="store_true", help="do nothing if it is installed for this torch"
    )
    parser.add_argument(
        "--wheel-only", action="store_true", help="print the path of the wheel, do not install it"
    )
    arguments = parser.parse_args(argv)
    try:
        if not (arguments.if_missing and is_installed()):
            _build(wheel_only=arguments.wheel_only)
    except StrategyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _build(*, wheel_only: bool) -> None:
    wheel = get_wheel()
    if wheel_only:
        print(wheel)
        return
    install(wheel)
    check()


def is_installed() -> bool:
    """True if the installed Horovod was built by this recipe for this torch, or comes
    from elsewhere and imports.
    """
    try:
        origin = distribution("horovod").read_text("direct_url.json")
    except PackageNotFoundError:
        return False
    url = json.loads(origin)["url"] if origin else ""
    if "/horovod/torch-" in url:  # from our cache, whose folder names contain torch's version
        # With any features: a later installation of MPI is no reason to replace a working build.
        return any(f"/{key}/" in url.replace("%2B", "+") for key in recipe.all_keys())
    return _run((sys.executable, "-c", "import horovod.torch")).returncode == 0


def get_wheel() -> Path:
    """Return the wheel for this torch from the cache; build a missing one. Raises StrategyError."""
    folder = cached_folder("horovod", recipe.key(), build_wheel)
    return next(folder.glob("*.whl"))


def build_wheel(folder: Path) -> None:
    """Download the release, patch this copy, and compile it into a
    wheel in ``folder``; raises StrategyError.
    """
    check_compiler()
    if shutil.which("mpicxx") and not recipe.find_features().mpi:
        print("building without MPI: mpicxx is here, but its header mpi.h is not", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="distcore-horovod-") as scratch:
        source = unpack(download(Path(scratch)))
        for patch in recipe.PATCHES:
            patch.apply(source)
        toolchain = Path(scratch, "toolchain.cmake")
        toolchain.write_text(recipe.TOOLCHAIN, encoding="utf-8")
        environment = recipe.environment(toolchain) | {
            "HOROVOD_CMAKE": provide_cmake(Path(scratch))
        }
        options = (
            "--verbose",
            "--no-cache-dir",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            str(folder),
        )
        compile_wheel((*PIP, "wheel", *options, str(source)), environment)


def check_compiler() -> None:
    """Raise StrategyError unless there are a C++ compiler and make."""
    compiler = os.environ.get("CXX", "c++")
    for tool in (compiler, "make"):
        if shutil.which(tool) is None:
            raise StrategyError(
                f"horovod cannot be built: no {tool!r} on this machine; install a C++20 compiler"
                " and make (Debian, Ubuntu: apt-get install g++ make; Fedora: dnf install gcc-c++"
                " make; macOS: xcode-select --install), then run distcore-horovod build again"
            )


def provide_cmake(scratch: Path) -> str:
    """Return a sufficiently new cmake: the machine's, else one that pip installs under ``scratch``.

    Raises StrategyError.
    """
    installed = os.environ.get("HOROVOD_CMAKE") or shutil.which("cmake")
    if installed and cmake_version(installed) >= recipe.OLDEST_CMAKE:
        return installed
    target = scratch / "cmake"
    done = _run((*PIP, "install", "--quiet", "--target", str(target), "cmake"))
    if done.returncode:
        oldest = ".".join(map(str, recipe.OLDEST_CMAKE))
        raise StrategyError(
            f"horovod cannot be built: no cmake of version {oldest} or later here, and pip could"
            f" not install one ({_last_error(done.stdout)}); install cmake"
        )
    return str(next(target.glob("cmake/data/bin/cmake")))


def cmake_version(executable: str) -> tuple[int, ...]:
    """Return (major, minor) of a cmake; an empty tuple if it does not run."""
    done = _run((executable, "--version"))
    match = re.search(r"version (\d+)\.(\d+)", done.stdout)
    return tuple(map(int, match.groups())) if match and not done.returncode else ()


def download(scratch: Path) -> Path:
    """Fetch the release's source archive with pip, which checks its hash; raises StrategyError."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{recipe.RELEASE} --hash=sha256:{recipe.SHA256}\n", encoding="utf-8")
    options = ("--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes")
    files = ("--dest", str(scratch), "--requirement", str(requirements))
    run = _run((*PIP, "download", *options, *files))
    if run.returncode:
        raise StrategyError(f"{recipe.RELEASE} cannot be downloaded: {_last_error(run.stdout)}")
    return next(scratch.glob("horovod-*.tar.gz"))


def unpack(archive: Path) -> Path:
    """Unpack the archive next to it; return the folder of the sources."""
    with tarfile.open(archive) as tar:
        # from Python 3.11.4 on
        safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(archive.parent, **safe)  # of an archive whose hash was checked
    return archive.parent / archive.name.removesuffix(".tar.gz")


def compile_wheel(command: Sequence[str], environment: dict[str, str]) -> None:
    """Run ``command``, with its progress on the screen and its output in a log file that is
    kept if it fails.

    Raises StrategyError, which names the log.
    """
    handle, name = tempfile.mkstemp(prefix="distcore-horovod-", suffix=".log")
    with (
        os.fdopen(handle, "w", encoding="utf-8") as log,
        BuildStatus(f"building {recipe.RELEASE}") as status,
    ):
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None  # stdout is a pipe
        for line in process.stdout:
            log.write(line)
            status.read(line)
        code = process.wait()
    if code:
        text = Path(name).read_text(encoding="utf-8")
        raise StrategyError(f"horovod did not compile: {_last_error(text)}; full log: {name}")
    Path(name).unlink()


def install(wheel: Path) -> None:
    """Install ``wheel`` into this environment without its dependencies; raises StrategyError."""
    done = _run((*PIP, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)))
    if done.returncode:
        raise StrategyError(f"{wheel} cannot be installed: {_last_error(done.stdout)}")


def check() -> None:
    """Start two processes that all-reduce with the installed Horovod; raises StrategyError."""
    done = _run((sys.executable, "-m", "distcore_horovod.check"))
    print(done.stdout, end="")
    if done.returncode:
        raise StrategyError(
            "horovod is installed but two processes could not all-reduce:"
            f" {_last_error(done.stdout)}"
        )


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def _last_error(output: str) -> str:
    """Return the first line in which a compiler or cmake reports an error, else the last
    line of the output.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for pattern in (re.compile(r"\b(fatal )?error: ", re.IGNORECASE), re.compile(r"CMake Error")):
        errors: Iterable[str] = filter(pattern.search, lines)
        if line := next(iter(errors), None):
            return line
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    raise SystemExit(main())

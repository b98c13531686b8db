"""The exceptions of distcore. A message is one line: problem, place, value, and remedy."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

NOT_ON_A_LINE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, line ends of any kind, and surrogates."""
LIBRARIES = {"site-packages", "dist-packages", f"python{sys.version_info[0]}.{sys.version_info[1]}"}
"""Folders of code that no user wrote."""
FLAG = re.compile(
    r"(?P<command>\b(?:distcore|pip|torchrun) [^;]*)|--set (?=\S+=)"
    r"|(?<![\w-])--(?P<name>[a-z][a-z-]*)(?: (?P<value>[^\s,;:()]+)(?=[,;:)]|$| or | --))?"
)
"""A flag of the command line in a message, or a command."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 + SIGINT."""
OURS = (f"{Path(__file__).parent}{os.sep}", f"{Path(__file__).parents[2] / 'plugins'}{os.sep}")
"""Folders of distcore and, in a checkout, of the plugins that come with it."""


class DistcoreError(Exception):
    """Base class of every error that distcore raises on purpose."""

    exit_code = 2
    """Exit status of a process that ends with this error."""

    def __str__(self) -> str:
        """Return the message on one line, whatever characters the user's names and values have."""
        return NOT_ON_A_LINE.sub(
            lambda match: match[0].encode("unicode_escape").decode(), super().__str__()
        )

    def _render_traceback_(self) -> list[str]:
        """Return one line for a program in Python: keys in place of flags, and
        the user's own line.
        """
        place = "" if re.search(r" at \S+:\d+$", str(self)) else raised_at(self)
        return [f"{type(self).__name__}: {with_keys(str(self))}{place}"]


class ConfigError(DistcoreError):
    """A configuration value that cannot work; found before any rank starts.

    ``remedies``, each flags of ``distcore train`` with their values, end the message: each
    of them would do.
    """

    remedies: Sequence[Mapping[str, object]] = ()

    def __init__(self, message: str = "", *remedies: Mapping[str, object]) -> None:
        flags = (
            " ".join(f"{flag} {value}" for flag, value in remedy.items()) for remedy in remedies
        )
        super().__init__(f"{message}; use {' or '.join(flags)}" if remedies else message)
        self.problem = message
        self.remedies = remedies


class DataError(DistcoreError):
    """An unusable data file; the message names the file and, if known, the row."""


class ModelError(DistcoreError):
    """A model or tokenizer that cannot be loaded or built."""


class MetaModelError(ModelError):
    """A model that cannot be built on the meta device, without storage, but can be built whole."""


class TaskError(DistcoreError):
    """A task that breaks its contract; the message names the method and its result."""


class StrategyError(DistcoreError):
    """A strategy or extension that is missing, blocked, does not import, or breaks the
    contract of a hook.
    """


class CheckpointError(DistcoreError):
    """A checkpoint that is missing, damaged or belongs to another job."""


class DamagedError(CheckpointError):
    """A damaged file of a checkpoint; the message names the file."""


class AgreementError(DistcoreError):
    """Ranks differ in a value on which they must agree (law 8); the message names the ranks."""

    exit_code = 3


class TrainingError(DistcoreError):
    """Training cannot continue: a loss or a gradient is not finite."""

    exit_code = 3


class StoppedError(DistcoreError):
    """SIGTERM or Ctrl-C ended the run: at the same step on all ranks after a checkpoint, or
    before there was one.
    """

    def __init__(self, message: str = "", exit_code: int = 143) -> None:
        """Take what was saved, and the exit status as shells have it: 128 + the signal."""
        super().__init__(message)
        self.exit_code = exit_code


class RankError(DistcoreError):
    """A rank failed; ``str()`` names the rank, the cause and the file with its traceback."""

    exit_code = 3


def print_uncaught_on_one_line() -> None:
    """Have a script that a DistcoreError ends print its line and exit with its status, unless it
    has its own hook.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_uncaught


def _print_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print a DistcoreError in one line and exit with its code; any other error as Python does."""
    if not isinstance(error, DistcoreError):
        sys.__excepthook__(kind, error, traceback)
        return
    # Around this hook torch puts one that would swallow the line, because the exit skips its end.
    screen = sys.stderr if sys.excepthook is _print_uncaught else sys.__stderr__
    print(*error._render_traceback_(), file=screen, flush=True)
    if not hasattr(sys, "ps1"):  # a prompt goes on
        raise SystemExit(error.exit_code)


def with_keys(message: str) -> str:
    """Return a message with the config key in place of each flag, as a program in Python has it."""

    def key(flag: re.Match[str]) -> str:
        name = (flag["name"] or "").replace("-", "_")
        value = flag["value"]
        given = f"={value if value[0].isdigit() else repr(value)}" if value else ""
        return flag["command"] or f"{name}{given}"

    return FLAG.sub(key, message)


@contextmanager
def refuse_endings() -> Iterator[None]:
    """Raise TaskError where the code of a task would end the process, or a loop of
    ours, without an error.

    With sys.exit(0) that looks like a run that is complete. A StopIteration ends loops; in the
    place of one that passes a generator Python raises a RuntimeError, which says nothing about
    where it is from.
    """
    try:
        yield
    except SystemExit as error:
        if isinstance(error.code, int) and error.code > 125:  # after a signal
            raise
        raise TaskError(
            f"the task's code, or a library, called sys.exit({error.code!r}){raised_at(error)}"
        ) from error
    except (StopIteration, RuntimeError) as error:
        stop = error if isinstance(error, StopIteration) else error.__cause__
        if not isinstance(stop, StopIteration):
            raise
        raise TaskError(
            "the task's code, or a library, took next() of what has no more values"
            " (StopIteration): give it a default, next(values, None), or use a for"
            f" loop{raised_at(stop)}"
        ) from error


def raised_at(error: BaseException) -> str:
    """Return ``"; raised at FILE:LINE"`` for the innermost line that the user wrote,
    or an empty string.

    Libraries, distcore and its plugins are passed over, unless nothing but a plugin is left.
    """
    import traceback

    frames = [
        frame
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if os.path.isfile(frame.filename)
    ]
    own = [frame for frame in frames if is_written_by_user(frame.filename)]
    is_ours = isinstance(error, DistcoreError)  # then a place in a plugin does not help the user
    plugins = [frame for frame in frames if f"{os.sep}distcore_" in frame.filename and not is_ours]
    if not (own or plugins):
        return ""
    place = (own or plugins)[0]
    return f"; raised at {place_of(place.filename, place.lineno)}"


def is_written_by_user(file: str) -> bool:
    """Return True for a file of code that is of no library and not ours."""
    return not (set(Path(file).parts) & LIBRARIES or file.startswith(OURS))


def packages_that_do_not_fit(error: BaseException) -> str | None:
    """Return a line about an ImportError that neither the user's code nor
    distcore's raised, or ``None``.

    Such as that of transformers with another release of tokenizers than it asks for: the
    environment is the user's.
    """
    import traceback

    files = [
        frame.filename
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.isfile(frame.filename)
    ]
    if not isinstance(error, ImportError) or not files:
        return None
    is_of_a_library = (
        bool(set(Path(files[-1]).parts) & LIBRARIES) and f"{os.sep}distcore" not in files[-1]
    )
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    how = "an installed package does not import: pip check names those that do not fit together"
    return f"{how}; {cause}" if is_of_a_library else None


def defined_at(function: object) -> str:
    """Return ``"; defined at FILE:LINE"`` for a function of a file, or an empty string."""
    code = getattr(function, "__code__", None)
    if code is None or not os.path.isfile(code.co_filename):
        return ""
    return f"; defined at {place_of(code.co_filename, code.co_firstlineno)}"


def place_of(file: str, line: int | None) -> str:
    """Return ``FILE:LINE``, with a path from here if the file is below the current folder."""
    return f"{file.removeprefix(f'{os.getcwd()}{os.sep}')}:{line}"


def write_traceback(
    error: BaseException, folder: Path | None = None, name: str = "traceback.txt"
) -> Path:
    """Write the traceback of ``error`` to ``folder``, by default a new temporary folder,
    and return the file.
    """
    import tempfile
    import traceback

    folder = folder or Path(tempfile.mkdtemp(prefix="distcore-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return path

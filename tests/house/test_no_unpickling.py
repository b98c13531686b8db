"""No source of ours reads what could execute something: no pickle, no YAML but the safe
kind, and no ``torch.load``.

One file reads other trainers' checkpoints by ``torch.load(…, weights_only=True)``, and names what
else it lets in. A second one reads ``pytorch_model.bin`` in this way. A third reads the
``.metadata`` of ``torch.distributed.checkpoint`` by an unpickler that makes only its classes.

test_checkpoint_audit.py watches the same while runs load checkpoints.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    file
    for folder in ("core", "plugins", "benchmarks", "tools", "examples")
    for file in (ROOT / folder).rglob("*.py")
    if "tests" not in file.parts
)
UNPICKLES = {
    "torch": {"load"},
    "pickle": {"load", "loads", "Unpickler"},
    "dill": {"load", "loads"},
    "cloudpickle": {"load", "loads"},
    "joblib": {"load"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "yaml": {"load_all", "unsafe_load", "full_load", "unsafe_load_all", "full_load_all"},
}


WEIGHTS_ONLY = (
    ROOT / "plugins/migrate/distcore_migrate/foreign/pickles.py",
    ROOT / "plugins/tasks/distcore_tasks/shared/converted_weights.py",
)
RESTRICTED = ROOT / "plugins/migrate/distcore_migrate/foreign/dcp_metadata.py"
"""Derives an unpickler with a ``find_class`` of its own; its tests give it a hostile file."""


def unpickles(source: str, weights_only: bool = False) -> list[str]:
    """The calls and imports of a source that read pickles, or YAML with objects in it."""
    calls, harmless = [], set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and any(is_weights_only(part) for part in node.keywords):
            harmless.add(node.func)
        if weights_only and node in harmless:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in UNPICKLES.get(node.value.id, ()):
                calls.append(f"{node.lineno}: {node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module in UNPICKLES:
            taken = {name.name for name in node.names} & UNPICKLES[node.module]
            calls += [f"{node.lineno}: from {node.module} import {name}" for name in sorted(taken)]
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
            calls.append(f"{node.lineno}: allow_pickle")
    return calls


def is_weights_only(part: ast.keyword) -> bool:
    return (
        part.arg == "weights_only"
        and isinstance(part.value, ast.Constant)
        and part.value.value is True
    )


def test_nothing_is_unpickled() -> None:
    calls = {
        file: unpickles(file.read_text(encoding="utf-8"), weights_only=file in WEIGHTS_ONLY)
        for file in SOURCES
    }
    assert [line.partition(": ")[2] for line in calls.pop(RESTRICTED)] == ["pickle.Unpickler"]
    assert calls
    assert not {str(file): lines for file, lines in calls.items() if lines}


def test_every_way_to_do_it_is_seen() -> None:
    ways = [
        "torch.load(file)",
        "from pickle import loads",
        "yaml.unsafe_load(text)",
        "np.load(f, allow_pickle=True)",
    ]
    assert len(unpickles("\n".join(ways))) == len(ways)
    harmless = [
        "json.load(file)",
        "yaml.safe_load(text)",
        "pickle.dumps(value)",
        "np.load(f, allow_pickle=False)",
    ]
    assert not unpickles("\n".join(harmless))
    assert unpickles("torch.load(file, weights_only=True)")
    assert unpickles("torch.load(file, weights_only=False)", weights_only=True)
    assert not unpickles("torch.load(file, weights_only=True)", weights_only=True)

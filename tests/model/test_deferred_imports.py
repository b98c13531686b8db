"""A deferred package is imported when it is first used, however that is, and then knows what was marked for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

DEFER = """
import importlib, sys, threading
import torch
from distcore.model.deferred_imports import defer_imports

defer_imports()
"""
CASES = {
    "an optimizer does without it": """
weights = torch.nn.Linear(2, 2)
weights(torch.ones(2)).sum().backward()
torch.optim.AdamW(weights.parameters()).step()
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert "torch._dynamo.eval_frame" not in sys.modules
""",
    "functions that were marked before are outside of compiled code": """
@torch.compiler.disable
def outside(x):
    return x + int(torch.compiler.is_compiling())

@torch.compiler.disable(recursive=False, reason="a test")
def outside_alone(x):
    return x * 3

@torch._dynamo.allow_in_graph
def opaque(x):
    return x * 2

graphs = []
def keep(graph, _):
    graphs.append(graph.code)
    return graph

held = torch._dynamo
assert outside(torch.ones(1)) == 1
compiled = torch.compile(lambda x: outside_alone(opaque(outside(x * 2)) + 1), backend=keep)
assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 15.0))
assert len(graphs) == 2 and "opaque" in graphs[1]
assert not any(name in code for name in ("outside", "* 3") for code in graphs)
assert torch._dynamo is sys.modules["torch._dynamo"] is not held
assert held.disable is torch._dynamo.disable and held.config is torch._dynamo.config
""",
    "a function of scipy imports its package when it is called": """
from scipy.optimize import linear_sum_assignment
assert "scipy.optimize._optimize" not in sys.modules
assert linear_sum_assignment([[4, 1], [2, 3]])[1].tolist() == [1, 0]
assert "scipy.optimize._optimize" in sys.modules
from scipy.optimize import linear_sum_assignment as own, minimize
assert own is not linear_sum_assignment and own([[4, 1], [2, 3]])[1].tolist() == [1, 0]
""",
    "models of transformers are imported without their index, which any other name imports": """
from transformers.models.bert import modeling_bert
index = sys.modules["transformers.models"]
assert type(index).__name__ == "Deferred"
assert index.bert.modeling_bert is modeling_bert and type(sys.modules["transformers.models"]).__name__ == "Deferred"
assert index.gpt2.GPT2Config.model_type == "gpt2"
assert type(sys.modules["transformers.models"]).__name__ == "_LazyModule"
assert sys.modules["transformers.models"].bert.modeling_bert is modeling_bert
""",
    "a class and a module are marked at once": """
layer = torch.compiler.disable(torch.nn.Linear(2, 2))
assert type(layer).__name__ == "OptimizedModule" and "torch._dynamo.eval_frame" in sys.modules
""",
    "threads get one package": """
taken = []
def by_part():
    from torch._dynamo.utils import counters
    taken.append(counters)

def by_name():
    taken.append(torch._dynamo.utils.counters)

threads = [threading.Thread(target=take) for take in (by_part, by_name, by_part, by_name)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(taken) == 4 and all(one is taken[0] for one in taken)
""",
} | {
    f"a part, {name}, is imported once": f"""
part = importlib.import_module("torch._dynamo.{name}")
assert part is sys.modules["torch._dynamo.{name}"] is torch._dynamo.{name}
assert "namespace" not in repr(getattr(part, "__spec__", None))
from torch._dynamo.symbolic_convert import counters
assert counters is sys.modules["torch._dynamo.utils"].counters
"""
    for name in ("utils", "config", "variables", "variables.builder")
}
FORKED = """
import os
for name, case in CASES.items():
    if (pid := os.fork()) == 0:
        exec(case, {**globals()})
        print("held:", name, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.programs
@pytest.mark.needs("distcore-tasks")
def test_a_deferred_package_is_imported_when_it_is_first_used() -> None:
    script = f"CASES = {CASES!r}\n{DEFER}{FORKED}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == [f"held: {name}" for name in CASES], done.stderr

"""The law of dropout by row notices a mesh whose ranks do not tell which part
of a mask they compute.
"""

from typing import Any

import pytest

from distcore import RunConfig, hookimpl
from distcore.model import RowMasks
from distcore.testing import STRATEGIES
from distcore.testing.subject import Subject
from distcore_mesh.strategy import MeshStrategy

pytestmark = pytest.mark.ranks


class TellsNothing(MeshStrategy):
    """Each rank drops the hidden units of the first part."""

    @hookimpl
    def setup(self, config: Any, rank_info: Any) -> Any:
        setattr(RowMasks, "set_parts", lambda self, parts: None)  # noqa: B010 -- in the ranks of this strategy alone
        return super().setup(config, rank_info)


def test_a_mesh_without_parts_breaks_the_law() -> None:
    config = RunConfig(strategy="mesh", strategy_options={"tp": 2}, nproc=2, device="cpu")
    case = STRATEGIES.required["dropout-by-row"]
    subject = Subject(config=config, cases=(case,), make=lambda _config: TellsNothing(tp=2))
    ((finding,),) = STRATEGIES.measure_all([subject])
    assert finding.held is False, str(finding)
    assert finding.law == "gradient"

"""Foreign imports by `distcore check`, where this plugin is installed beside the
one that it requires.
"""

from __future__ import annotations

from unittest.mock import patch

from distcore.testing import fresh

WHEELS = {
    "distcore_fsdp": ["distcore-fsdp"],
    "distcore_mesh": ["distcore-mesh"],
    "horovod": ["horovod"],
}
"""What the metadata say of wheels; an editable installation has no modules there."""


def test_the_distribution_of_a_strategy_is_not_foreign_to_itself() -> None:
    with patch.object(fresh, "packages_distributions", lambda: WHEELS):
        assert not {"distcore_fsdp", "distcore_fsdp.strategy"} & fresh.foreign("fsdp")
        assert "distcore_fsdp" in fresh.foreign("ddp")

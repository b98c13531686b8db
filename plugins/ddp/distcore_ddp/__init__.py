"""torch's DistributedDataParallel and DataParallel as distcore strategies.

Other plugins that wrap a model in torch's DistributedDataParallel may import
the names in ``__all__``.
"""

from distcore_ddp.replicas import (
    check_gradients_averaged,
    explain_second_gradients,
    has_state_in_buffers,
    rebuild_gradient_buckets,
    spare_evaluations,
    spare_unsendable_buffers,
)
from distcore_ddp.sums import sum_hook
from distcore_ddp.traced_buckets import TracedBuckets

__all__ = [
    "TracedBuckets", "check_gradients_averaged", "explain_second_gradients",
    "has_state_in_buffers", "rebuild_gradient_buckets", "spare_evaluations",
    "spare_unsendable_buffers", "sum_hook",
]  # fmt: skip
__version__ = "0.1.0"

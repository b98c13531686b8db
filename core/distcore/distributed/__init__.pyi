from distcore.distributed.devices import COLLECTIVES as COLLECTIVES
from distcore.distributed.devices import count_accelerators as count_accelerators
from distcore.distributed.devices import count_devices as count_devices
from distcore.distributed.devices import has_jagged_attention as has_jagged_attention
from distcore.distributed.devices import memory_overhead as memory_overhead
from distcore.distributed.devices import peak_memory as peak_memory
from distcore.distributed.devices import resolve_device as resolve_device
from distcore.distributed.process_group import gather_rows as gather_rows
from distcore.distributed.process_group import open_store as open_store
from distcore.distributed.repeated_calls import RepeatedCalls as RepeatedCalls

__all__: list[str]

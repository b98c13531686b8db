from distcore.model.averages import use_average as use_average
from distcore.model.blocks import hidden_matrices as hidden_matrices
from distcore.model.blocks import repeated_blocks as repeated_blocks
from distcore.model.blocks import repeated_classes as repeated_classes
from distcore.model.compiling import missing_compiler as missing_compiler
from distcore.model.deferred_init.malloc import return_large_blocks as return_large_blocks
from distcore.model.hooks_on_gradients import gradient_hooks as gradient_hooks
from distcore.model.model_source import build_in_parts as build_in_parts
from distcore.model.optim import check_optimizer as check_optimizer
from distcore.model.optim import freeze as freeze
from distcore.model.optim import optimizer_class as optimizer_class
from distcore.model.optim import optimizer_factory as optimizer_factory
from distcore.model.optim import scheduler_for as scheduler_for
from distcore.model.optimizers.adam import can_fuse as can_fuse
from distcore.model.pretrained_slices import meta_tensors as meta_tensors
from distcore.model.row_dropout import RowMasks as RowMasks
from distcore.model.row_dropout import current_masks as current_masks
from distcore.model.run_schedule import schedule_class as schedule_class
from distcore.model.schedules import load_schedule as load_schedule
from distcore.model.transformers_log import silence_transformers as silence_transformers

__all__: list[str]

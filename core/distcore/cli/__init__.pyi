from distcore.cli.commands.train import add_job_flags as add_job_flags
from distcore.cli.commands.train import changes_of as changes_of
from distcore.cli.flags import FLAGS as FLAGS
from distcore.cli.flags import add_choice as add_choice
from distcore.cli.launcher_flags import flags_that_start as flags_that_start
from distcore.cli.launcher_flags import is_launcher_asked as is_launcher_asked
from distcore.cli.launcher_flags import spec_of as spec_of
from distcore.cli.tables import GAP as GAP
from distcore.cli.tables import print_cells as print_cells
from distcore.cli.tables import print_described as print_described
from distcore.cli.tables import say as say
from distcore.cli.tables import stdout_console as stdout_console
from distcore.cli.task_flags import first_sentence as first_sentence
from distcore.cli.task_flags import metrics_in_words as metrics_in_words
from distcore.config.loading import JobRequest as JobRequest
from distcore.config.loading import canonical as canonical
from distcore.config.values import parse_settings as parse_settings
from distcore.config.values import parse_values as parse_values
from distcore.jobs.logs import set_up_logging as set_up_logging

__all__: list[str]

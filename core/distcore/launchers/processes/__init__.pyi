from distcore.launchers.processes.contexts import handle_stop_signals as handle_stop_signals
from distcore.launchers.processes.contexts import raise_on_sigterm as raise_on_sigterm
from distcore.launchers.processes.contexts import silence_torchelastic as silence_torchelastic
from distcore.launchers.processes.cores import available_cores as available_cores
from distcore.launchers.processes.cores import crowding_warning as crowding_warning
from distcore.launchers.processes.cores import threads_chosen as threads_chosen
from distcore.launchers.processes.cores import threads_per_rank as threads_per_rank
from distcore.launchers.processes.failures import exit_now as exit_now
from distcore.launchers.processes.failures import one_line as one_line
from distcore.launchers.processes.log_files import close_stderr as close_stderr
from distcore.launchers.processes.memory_kills import oom_kills as oom_kills
from distcore.launchers.processes.rank import record_killed as record_killed

__all__: list[str]

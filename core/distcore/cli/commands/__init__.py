"""The commands, one module each: ``add_arguments(parser)`` and ``run(arguments) -> exit code``."""

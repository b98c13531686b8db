"""The command line: it parses arguments, starts a job and prints. No module here imports torch directly."""

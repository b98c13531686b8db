"""The command line: it reads arguments, starts a job and prints; nothing here imports torch."""

"""The training loop, and the steps around it: resolve a config, build a run, train, evaluate, log."""

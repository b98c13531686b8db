"""The training loop and what stands around it: resolve a config, build a run, train, evaluate, log."""

"""The run: the training loop, and what stands around it. Begin with `loop`."""

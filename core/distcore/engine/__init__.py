"""A run: the training loop, evaluation, and the trainer around them. Begin with `loop`."""

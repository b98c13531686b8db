"""The rows of a step, and the cut of a step into micro-batches. Begin with `sampling`."""

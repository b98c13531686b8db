"""Which rows make a step, and how a step is cut into micro-batches. Begin with `sampling`."""

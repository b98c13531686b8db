"""The strategy of the core, the reference for all others. Begin with `single`."""

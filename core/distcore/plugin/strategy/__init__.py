"""The side of a strategy: hook specs, what passes through them, and the defaults. Begin with `hookspecs`."""

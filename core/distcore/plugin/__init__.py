"""What a plugin sees: contract, hooks, sampler and options; and how plugins are found and registered."""

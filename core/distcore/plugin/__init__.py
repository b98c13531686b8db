"""What a plugin sees: the contract, the hooks, the sampler, options, and how plugins are found and bound."""

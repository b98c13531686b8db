"""The optimizers that come with distcore, by name: their options, and how each is built."""

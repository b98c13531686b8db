"""Reading, splitting and tokenising text, once, into a cache that every rank maps into memory."""

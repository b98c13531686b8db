"""One training loop, distributed backends as plugins, the same mathematics under each."""

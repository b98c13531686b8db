"""From a config to ranks that train, evaluate or export; nothing here knows a command line."""

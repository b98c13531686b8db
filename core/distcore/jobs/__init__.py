"""From a config to ranks that train, evaluate or export. No module here knows the command
line. Begin with `train`.
"""

"""From a config to the resolved run: fill in every 'auto', refuse what cannot
work. Begin with `resolve`.
"""

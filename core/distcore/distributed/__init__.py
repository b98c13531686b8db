"""Building blocks of strategies: process group, flat buffers, devices, and
agreement checks between ranks.

Begin with `process_group`.
"""

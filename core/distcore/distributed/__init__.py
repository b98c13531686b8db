"""What strategies build on: process group, flat buffers, devices, and checks that ranks agree.

Begin with `process_group`.
"""

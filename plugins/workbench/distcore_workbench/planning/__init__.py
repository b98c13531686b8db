"""The needs of a job, before it runs: memory of each rank, bytes on the wire, and the
size of a checkpoint.
"""

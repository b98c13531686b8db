"""The extension ``observe``: figures of speed, time and memory while a run trains, and
where its time went.
"""

"""The scheduler: which requests run next, on which blocks. Integers only: no array of a library, no clock, no
thread.
"""

"""Integers in, plan out: which blocks of which component rest where, through how much staging memory the others
stream, and why. Neither torch nor a device is needed to compute a plan.
"""

"""What a real GPU can tell and simulated devices cannot, in four parts of less than nine minutes each.

``python -m benchmarks gpu [--part a|b|c|d] [--resume] [--rehearse]``. Rows are written as they come; ``--rehearse``
runs the same code on simulated devices with small shapes.
"""

"""Random runs on random machines, all ways to place them by reckoned time, and what a placed run takes.

For `python -m benchmarks planner`. `instance` draws them, `search` tries all placements, `runs` measures one.
"""

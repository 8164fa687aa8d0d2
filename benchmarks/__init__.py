"""Side-by-side measurements. ``python -m benchmarks NAME [--json]``; each case ends with one ratio."""

"""A CUDA driver without a card, for comfy-aimdo on simulated devices: core's dynamic VRAM runs, unmodified.

`fake_cuda.c` is the driver and says how it works; `build.py` compiles it, once; `start.py` is what a host process runs,
and holds the whole list of what is replaced in core or comfy-aimdo.
"""

"""Devices and copies to them: page-locked host memory, slabs, bounce buffers, link speeds, and the copy stream. The
only folder that touches a device's stream or event.
"""

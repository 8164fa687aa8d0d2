"""Which components may stay on a device: registration, admission, watermarks, eviction, what was learned of needs and
speeds, the event log and the report.
"""

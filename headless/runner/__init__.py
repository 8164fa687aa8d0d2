"""Workflow files, the order in which their nodes run, and what is kept of their results."""

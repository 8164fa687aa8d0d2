"""Nodes for pipeline folders of diffusers: finding, checking, loading and sampling them."""

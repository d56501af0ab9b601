"""Grouped matrix product of the routed experts."""

"""A run's record, and the page made from it."""

"""Mirrors calibrate/."""

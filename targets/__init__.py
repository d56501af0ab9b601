"""Chips: what each is, what it can hold, and which implementations run on it."""

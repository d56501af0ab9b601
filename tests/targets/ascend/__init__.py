"""Tests of the Ascend lowering."""

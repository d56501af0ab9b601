"""Huawei Ascend: its chips, and Triton kernels lowered for them on any x86-64 machine."""

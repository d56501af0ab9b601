"""Triton and Gluon kernels of calibration. Nothing here is imported before it is launched."""

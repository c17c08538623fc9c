"""Kernels that fail their self-tests."""

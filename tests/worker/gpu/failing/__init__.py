"""Kernels that fail their trials."""

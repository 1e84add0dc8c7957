"""Measuring: time, exact peak memory and correctness of the kernels beside their alternatives."""

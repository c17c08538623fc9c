"""Our own kernels on a GPU, in Triton, which torch brings along there. Without them everything runs on torch's own."""

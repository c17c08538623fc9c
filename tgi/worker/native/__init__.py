"""Our own kernels for CPUs, in C++: compiled on this machine when they are first needed, and kept."""

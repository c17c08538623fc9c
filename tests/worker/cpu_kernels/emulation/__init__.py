"""Runs the tests of the CPU kernels for the instruction sets of another processor, in an emulator.

With TGI_EMULATE=neon in the environment (an instruction set for aarch64), tests/worker/conftest.py calls `emulate`.
Kernels are then compiled by a cross compiler and computed by qemu-user, and the tests stay as they are: `library` gives
the emulated library the interface of ctypes.CDLL. scripts/test-neon runs all tests of kernels so, test_neon.py some.

The emulator's results are those of the processor to the bit. It does not show races that only a processor with weakly
ordered memory has, and its speed says nothing.
"""

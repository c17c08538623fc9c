"""Runs a command on x86-64 Linux that refuses AMX to processes, as Linux before 5.16 does: refuse_amx.py COMMAND...

A seccomp filter lets the system call that asks for AMX fail.
"""

import ctypes
import os
import struct
import sys

from tgi.worker.host_cpu import ARCH_PRCTL, REQUEST_PERMISSION

NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER_MODE = 38, 22, 2  # of prctl
LOAD, SKIP_UNLESS_EQUAL, RETURN = 0x20, 0x15, 0x06  # instructions of a filter
NUMBER, ARGUMENT = 0, 16  # offsets of the system call's number and first argument
FAIL, ALLOW = 0x00050000 | 22, 0x7FFF0000  # with EINVAL

INSTRUCTIONS = (  # code, instructions to skip if equal and if not, operand
    (LOAD, 0, 0, NUMBER),
    (SKIP_UNLESS_EQUAL, 0, 3, ARCH_PRCTL),
    (LOAD, 0, 0, ARGUMENT),
    (SKIP_UNLESS_EQUAL, 0, 1, REQUEST_PERMISSION),
    (RETURN, 0, 0, FAIL),
    (RETURN, 0, 0, ALLOW),
)


def refuse_amx() -> None:
    """For this process and its children."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in INSTRUCTIONS))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(INSTRUCTIONS), ctypes.addressof(program)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or prctl(SET_SECCOMP, FILTER_MODE, described, 0, 0):
        sys.exit(f"refuse_amx.py: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    refuse_amx()
    os.execvp(sys.argv[1], sys.argv[1:])

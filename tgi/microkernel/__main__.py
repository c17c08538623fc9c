"""The entry point of a supervised process: `python -P -m tgi.microkernel ROLE REPLICA`."""

import sys

from tgi.microkernel.processes.process import run_role

if __name__ == "__main__":
    run_role(sys.argv[1:])

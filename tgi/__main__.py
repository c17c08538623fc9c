"""`python -m tgi` is `tgi`."""

from tgi.cli import main

main()

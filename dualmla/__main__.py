"""`python -m dualmla` is the command `dualmla`."""

from dualmla.cli import main

main()

"""`python -m layerzero.cli`."""

from layerzero.cli import main

main()

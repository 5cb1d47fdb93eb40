"""`python -m layerzero_cli`."""

from layerzero_cli import main

main()

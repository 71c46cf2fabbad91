"""`python -m excite`, and `torchrun -m excite` for several processes: the command line."""

from excite.cli.app import main

if __name__ == "__main__":
    main()

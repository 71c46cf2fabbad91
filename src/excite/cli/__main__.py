"""`python -m excite.cli`: the command line."""

from excite.cli.app import main

if __name__ == "__main__":
    main()

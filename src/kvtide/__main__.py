"""`python -m kvtide`: the same as the `kvtide` command."""

from kvtide.cli import main

if __name__ == "__main__":
    main()

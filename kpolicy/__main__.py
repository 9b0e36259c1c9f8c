"""`python -m kpolicy`."""

from kpolicy.cli import main

if __name__ == "__main__":
    main()

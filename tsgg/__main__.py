"""`python -m tsgg` is `tsgg`."""

from tsgg.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

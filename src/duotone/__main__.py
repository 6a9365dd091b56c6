"""`python -m duotone` is the command `duotone`."""

from duotone.cli import main

if __name__ == "__main__":
    main()

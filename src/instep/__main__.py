"""`python -m instep` is the `instep` command."""

from instep.cli import main

if __name__ == "__main__":
    main()

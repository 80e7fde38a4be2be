"""python -m mlakern.cli is the `mlakern` command."""

from mlakern.cli import main

if __name__ == "__main__":
    main()

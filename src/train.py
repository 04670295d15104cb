"""`python -m train`: compose the settings, train, and print the result."""

from flatout.distributed.imports import leaving_at_once

with leaving_at_once():
    from flatout.cli.train import main

if __name__ == "__main__":
    main()

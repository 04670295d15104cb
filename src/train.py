"""`python -m train`: compose the settings, train, and print the result."""

from flatout.cli.train import main

if __name__ == "__main__":
    main()

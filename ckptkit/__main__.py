"""Run the command line for `python -m ckptkit` and `torchrun -m ckptkit`."""

from ckptkit.cli import main

if __name__ == "__main__":
    main()

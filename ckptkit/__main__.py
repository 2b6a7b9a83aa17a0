"""Run `python -m ckptkit`, and so `torchrun -m ckptkit`."""

from ckptkit.cli import main

if __name__ == "__main__":
    main()

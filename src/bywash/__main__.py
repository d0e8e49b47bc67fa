"""`python -m bywash`, the form that torchrun starts: `torchrun --nproc-per-node 4 -m bywash run ...`."""

from bywash.cli.main import main

if __name__ == "__main__":
    main()

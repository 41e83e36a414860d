"""Entry point of ``python -m lightning_megatron``, the same command as ``lightning-megatron``."""

from __future__ import annotations

from lightning_megatron.cli.main import main

if __name__ == "__main__":
    main()

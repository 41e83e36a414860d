"""Run the command `lightning-megatron` as `python -m lightning_megatron`."""

from __future__ import annotations

from lightning_megatron.cli import main

if __name__ == "__main__":
    main()

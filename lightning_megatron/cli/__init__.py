"""Commands of the ``lightning-megatron`` program."""

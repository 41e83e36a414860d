"""Log calls and outputs of microbatches, merged for the whole batch."""

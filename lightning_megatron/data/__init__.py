"""Token files, tokenizers, samples, datamodules; nothing communicates: data-parallel rank and size are arguments."""

"""Token files, tokenizers, samples and data modules.

No module here communicates: the data-parallel rank and size are arguments.
"""

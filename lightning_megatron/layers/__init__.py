"""Transformer layers sharded over the tensor axis, each equal to an unsharded counterpart in torch.

Activations are sequence first. Annotations name the dimensions of tensors, as in
``Float[Tensor, "seq_local batch hidden"]``. A name has one size in one call, and the tests check
that. These names have one meaning in the layers, kernels, experts and models:

- ``seq``: positions of a sequence (tokens).
- ``seq_local``: positions of a sequence that this rank holds, ``seq / tp`` under sequence
  parallelism and ``seq`` otherwise (tokens).
- ``seq_part``: positions of a sequence that the ranks of one position on the cp axis hold,
  ``seq / cp`` (tokens).
- ``batch``: sequences of a microbatch (sequences).
- ``hidden``: hidden size, the features of the residual stream (elements).
- ``heads``: query heads of this rank (heads).
- ``kv_heads``: key/value heads of this rank; ``heads`` is a multiple of it (heads).
- ``head_dim``: size of a head (elements).
- ``value_dim``: size of a value head, where it may differ from that of queries and keys (elements).
- ``rotary_dim``: elements of a head that the rotary embedding rotates, at most ``head_dim``
  (elements).
- ``slots``: tokens of a row that a cache has memory for (tokens).
- ``documents``: lengths of the documents of a row, some of which may be 0 (documents).
- ``borders``: cumulative lengths of documents, one more than there are documents (borders).
- ``pieces``: pieces of a sequence or document that context parallelism cuts, ``2 cp`` (pieces).
- ``qkv_local``: query, key and value features of this rank, ``(heads + 2 kv_heads) head_dim``
  (elements).
- ``ffn``: inner features of an MLP or of an expert on this rank (elements).
- ``gate_up``: inner features with their gates, ``2 ffn`` (elements).
- ``features``: inputs of an activation, ``ffn`` or ``gate_up`` (elements).
- ``in_features``, ``out_features``: all input and output features of a linear layer (elements).
- ``in_local``, ``out_local``: input and output features of this rank (elements).
- ``vocab``: the vocabulary without padding (tokens).
- ``vocab_local``: columns of the logits on this rank, the padded vocabulary divided by tp (tokens).
- ``tokens``: tokens of this rank, ordered by position, then by sequence (tokens).
- ``experts``: experts of a layer, or of this rank where the text says so (experts).
- ``homes``: home experts of each rank, whose parameters the rank holds (experts).
- ``places``: places for clones of experts: of all ranks in a plan, of this rank in matrix products
  (places).
- ``all_places``: places of all ranks, where ``places`` are those of this rank (places).
- ``top_k``: experts selected for each token (experts).
- ``rows``: rows of a matrix; in experts, one for each token and selected expert, sorted by expert
  (rows).
- ``columns``: columns of a matrix (columns).
- ``layers``: linear layers of this rank that compute in 8 bits (layers).
- ``weights``: weights of a flat buffer that are kept in 8 bits (weights).
- ``history``, ``saved``: steps whose magnitudes are kept, in a run and in a checkpoint (steps).
- ``padded``: rows of a matrix with padding, the columns of its transpose (rows).
- ``summed``: elements of a row that a matrix product sums up (elements).
- ``selections``: pairs of a token and an expert that is selected for it, ``tokens top_k``.
- ``sequences``: sequences with separate routing sums, 1 if all share one sum (sequences).
- ``sums``: sums of a router's statistics, ``5 + experts``.
- ``buffer_rows``: rows of the token buffers of all ranks of the expert axis (tokens).
- ``ranks``: ranks of the expert axis, or those that share a sequence (ranks).
- ``labels``: classes of a classifier.
- ``parts``: terms of a sum.
- ``shape``: as ``*shape``, any dimensions.

A number is the size itself. ``*tokens`` stands for any number of dimensions, equal in one call,
``...`` for any dimensions and ``_`` for any size. ``#batch`` means ``batch`` or 1. An expression,
such as ``2*ffn``, is computed from the names and from the arguments in braces.

Rooms without such annotations write shapes with letters: S is ``seq``, B ``batch``, D ``hidden``, V
the vocabulary, E ``experts``, and in ``groups.collective_matmul`` K the summed dimension of a
matrix product. In modules of torch with an encoder and a decoder, S and T are the positions of the
encoder and of the decoder.
"""

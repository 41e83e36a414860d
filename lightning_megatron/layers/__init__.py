"""Transformer layers sharded over the tensor axis, each equal to an unsharded counterpart in torch.

Activations are sequence first: ``(S, B, D)``. Shapes are local to a rank. A dimension that is
divided by the size of an axis is sharded over that axis, such as ``S/tp``. These letters have one
meaning in the layers, kernels, experts and models:

- ``S``: positions of a sequence, ``S/tp`` under sequence parallelism (tokens).
- ``B``: sequences of a microbatch (sequences).
- ``D``: hidden size, the features of the residual stream (elements).
- ``H``: query heads of this rank (heads).
- ``G``: key/value heads of this rank, of which H is a multiple (heads).
- ``K``: size of a head (elements).
- ``r``: elements of a head that the rotary embedding rotates, at most K (elements).
- ``F``: inner features of an MLP or of an expert; a gate doubles them to ``2 F`` (elements).
- ``V``: vocabulary; a tensor-parallel rank has ``padded V/tp`` columns of the logits (tokens).
- ``W``: columns of a shard of the logits, padding included (columns).
- ``T``: tokens of this rank, ordered by position, then by sequence (tokens).
- ``E``: experts of a layer, or experts of this rank where no axis is named (experts).
- ``k``: experts that each token chooses (experts).
- ``R``: rows that experts compute, one for each token and chosen expert, sorted by expert (rows).
- ``C``: sequences with routing sums of their own, 1 if all sequences share them (sequences).
- ``N``: any number of rows.
- ``in``, ``out``: input and output features of a linear layer (elements).
- ``tp``, ``ep``: sizes of the tensor axis and of the expert axis (ranks).

``...`` stands for any leading dimensions. There are two exceptions. In ``groups.collective_matmul``
and ``experts.compute.backends``, K is the summed dimension of a matrix product, and N and M are the
others. In modules of torch with an encoder and a decoder, S and T are the positions of the encoder
and of the decoder.
"""

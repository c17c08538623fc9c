"""Layers that models are built of. On CPU results are batch invariant: a row's bits do not depend on the other rows. On
a GPU they are with `--batch-invariant`.

linear      matrix products with epilogues, in row counts that agree bit for bit; read this first
norm        RMS norm and layer norm
rotary      rotary position embedding and its scaling types
mlp         dense MLP and mixture of experts
embedding   token embedding
recurrence  recurrent mixers with their projections; short_conv, gated_delta and mamba2 are such mixers
head_products  products of each head with a matrix of its own
streams     several streams of hidden states (AltUp)
"""

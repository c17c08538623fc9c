"""Layers that models are built of. Results are batch invariant: a row's bits do not depend on the other rows.

linear      matrix products with epilogues, in row counts that agree bit for bit; read this first
norm        RMS norm and layer norm
rotary      rotary position embedding and its scaling types
mlp         dense MLP and mixture of experts
embedding   token embedding
"""

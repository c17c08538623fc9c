"""LoRA adapters (Hu et al. 2021): y = W x + s B (A x), with A and B of low rank for some matrices of the model.

Read registry.py first, then weights.py.

- registry: the loaded adapters by name and by content; loads and unloads them while steps run
- config: an adapter's adapter_config.json
- projections: what adapters may change, and the memory that they take, without torch
- weights: an adapter's matrices, and how they are read from safetensors
- deltas: what adapters add to a step's projections, by torch
- packed_deltas: the same on our own CPU kernels
"""

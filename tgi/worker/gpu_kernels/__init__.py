"""The worker's GPU kernels, in Triton, which torch depends on. Without them torch's own kernels compute.

Invariant: each row of a result is summed in an order that does not depend on the other rows of the launch.

Read kernels.py first: GpuKernels, the functions by name. Each module below holds one kernel, the function that
launches it, and `self_test(device)`, which compares it with torch on small tensors before the worker relies on it:

- norm, rope, gated_activation: per row, in one launch each,
- kv_write: keys and values into the paged KV cache, converted to its type,
- paged_attention: decode attention over the pages (flash decoding),
- quantized_matmul: few rows times a quantized weight,
- float8: activations as 8-bit floats,
- sampling: from the logits to the tokens of a step and their logprobs.

selection runs all self-tests and decides; self_test has their helpers.
"""

"""The worker's GPU kernels, in Triton, which torch depends on. Without them torch's own kernels compute.

Invariant: each row of a result is summed in an order that does not depend on the other rows of the launch; of
attention, in as many splits as fit to the number of rows.

Read kernels.py first: GpuKernels, the functions by name. Each module below holds one kernel, the function that
launches it, and `self_test(device)`, which compares it with torch on small tensors before the worker relies on it:

- norm, gated_activation: per row, in one launch each,
- kv_write: from the qkv projection to attention: norms of heads, rotary embedding, the write to the paged KV cache,
- paged_attention: attention over the pages, of decode rows, prompts and drafts; attention_arguments has its data,
- quantized_matmul: few rows times a quantized weight,
- float8: activations as 8-bit floats.

selection runs all self-tests and decides; self_test has their helpers.
"""

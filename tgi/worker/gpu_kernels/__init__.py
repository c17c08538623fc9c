"""The worker's GPU kernels, in Triton, which torch depends on. Without them torch's own kernels compute.

Invariant: each row of a result is summed in an order that does not depend on the contents of the other rows of the
launch. The number of rows chooses the splits of contexts and the tiles of products, experts and routing, unless
`batch_invariant` asks for one order always.

Read kernels.py first: GpuKernels, the functions by name. Each module below holds one kernel, the function that
launches it, and `self_test(device)`, which compares it with torch on small tensors before the worker relies on it:

- norm, gated_activation: per row or element, in one launch each,
- kv_write: from the qkv projection to attention: norms of heads, rotary embedding, the write to the paged KV cache,
- paged_attention: attention over the pages, of decode rows, prompts and drafts; attention_arguments has its data,
- latent_write: the same as kv_write for latent attention,
- causal_conv, delta_rule, ssd: the mixers of recurrent layers, with their state,
- matmul: rows times a weight in 16 or 32 bits, in one order for any number of rows,
- quantized_matmul: rows times a quantized weight,
- routing: which tokens each expert of a mixture computes, and the weighted sum of a token's experts,
- grouped_matmul: sorted rows times the weights of their experts, plain or quantized,
- lora: what adapters add to projections,
- float8: activations as 8-bit floats,
- sampling: from the logits to the tokens of a step and their logprobs.

selection runs all self-tests and decides; self_test has their helpers.
"""

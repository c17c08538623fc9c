"""The worker's CPU kernels, in C++ for AVX2, AVX-512, AMX and NEON, from the package or compiled on first use.

Invariant: each row of a result is summed in an order that depends neither on the other rows of the call, nor on the
number of threads, nor on which thread computes it. So a request's tokens do not depend on its batch.

Read kernels.py first: the kernels as functions of tensors. Then:

- selection: whether the CPU kernels can compute the models of this worker,
- build: compiled libraries, one for each instruction set and element type, and the compiler call,
- program: the operations of all layers, recorded at load and run as one call per step,
- quantizer: quantizes weights at load, bit for bit as quantization/quantize.py,
- arena: memory in huge pages for weights, KV cache and scratch buffers.

C++ sources, from the bottom up (interface.cpp lists all functions that Python calls):

- elements.h, simd.h, vector_math.h: number types, vectors on every instruction set, and functions of them,
- thread_pool, prefetch.h: threads, cache hints,
- packed_weight: the layout of packed weights,
- engine.h: products of tiles, up to 32 rows times 32 columns, by the dot engine (dot_tile.h, dot_decoders.h; AMX,
  AVX-512 or NEON in bfloat16) or the FMA engine (fma_tile.h, fma_decoders.h; all else),
- linear.cpp with linear_job.h, dot_linear.h and byte_planes, or fma_linear.h; epilogue.h, work_stealing.h: layers.
  Each kind of weight formats is compiled in a file of its own (linear_numbers.cpp, ...),
- head, argmax: logits, and greedy tokens without storing the logits,
- attention.cpp with kv_cache.h, attention_tile.h and online_softmax.h: paged attention,
- causal_conv, delta_rule, ssd: recurrent layers (recurrent.py),
- norm, rope, lora, gate, gather_rows: the other operations of a layer,
- program: the recorded layers; quantize_weights: see quantizer; memory_read, fma_peak: measurements.

Most of these files are compiled together (see build.ALONE), so names in their anonymous namespaces differ.
"""

"""The worker's CPU kernels, in C++ for AVX-512 and AMX: compiled on this machine on first use, and cached.

Invariant: each row of a result is summed in an order that depends neither on the other rows of the call, nor on the
number of threads, nor on which thread computes it. So a request's tokens do not depend on its batch.

Read kernels.py first: the kernels as functions of tensors. Then:

- selection: whether the CPU kernels can compute the models of this worker,
- build: the compiler call and the cache of compiled libraries,
- program: the operations of all layers, recorded at load and run as one call per step,
- quantizer: quantizes weights at load, bit for bit as quantization/quantize.py,
- arena: memory in huge pages for weights, KV cache and scratch buffers.

C++ sources, from the bottom up (interface.cpp lists all functions that Python calls):

- thread_pool, prefetch.h, vector_math.h: threads, cache hints, float32 vector functions,
- packed_weight, dequantize.h: the layout of packed weights, and the decoding of quantized ones,
- tile_matmul.h: products of tiles, up to 32 rows times 32 columns with AMX or AVX-512,
- linear.cpp with epilogue.h, byte_planes and work_stealing.h: linear layers,
- head, argmax: logits, and greedy tokens without storing the logits,
- attention.cpp with kv_cache.h, attention_tile.h and online_softmax.h: paged attention,
- norm, rope, lora, gather_rows: the other operations of a layer,
- program: the recorded layers; quantize_weights: see quantizer; memory_read: a bandwidth measurement.
"""

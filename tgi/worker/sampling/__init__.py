"""Sampling: from logits to sampled tokens. Read sampler.py first, then logits_processors.py.

- sampler: the logits processors, the greedy or random choice, logprobs, top-n alternatives
- logits_processors: one function for each processor, in the order of application
- sampling_batch: the sampling parameters of slots and of a step's rows, as columns
- noise: reproducible noise, keyed by seed, choice and position
- top_logprobs: the top-n alternatives of each sampled token
- verification: speculative decoding: which sampled tokens confirm their drafts
- grammar: compiled grammars and the token bitmask of each row that has one
- reasoning_budget: which token is forced once a row has reasoned enough; grammar applies it
- token_bitmask: masks of one bit for each token
- watermark: the watermark of Kirchenbauer et al. and its detection
"""

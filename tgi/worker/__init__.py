"""The worker process: loads the model and computes the scheduler's steps. The only package that imports torch.

Read main.py first, then engine/loop.py and engine/engine.py.

- main: `tgi worker`
- engine: the loop, the torch engine, CUDA graphs, memory, start-up
- sampling: logits processors, sampler, grammars, speculative verification
- models, layers, attention: the forward pass
- mixers: the sizes and tensors of recurrent layers
- vision: images of prompts
- quantization: weights of few bits
- lora: adapters
- distributed: tensor parallelism
- placement: ranks on a Ray cluster
- planning: `tgi plan`, which needs no torch
- cpu_kernels, gpu_kernels: our own compute kernels
- fake_worker: a worker without a model, for tests and benchmarks
- greedy: argmax of the logits, for models and kernels that compute it themselves
- activations, checkpoint, decoder_config: activation functions, reading checkpoints, the shape of a decoder
- tensor_shapes: shapes of weights and states, without torch
- kv_cache_sizes, state_cache: bytes of a token of KV cache; what recurrent layers keep of a request
- host_cpu, instruction_sets: the host's processor, and the instruction sets that kernels are compiled for
- device_copies: copies between host and device that do not wait
"""

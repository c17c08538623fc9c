"""The worker's loop and its torch engine, which computes the scheduler's steps. Read loop.py first, then engine.py.

- loop: receives steps, keeps up to two of them in flight, sends results
- interface: what the loop expects of an engine; the errors that engines raise
- engine: `TorchEngine`: launches a step on the model, samples, collects the result
- input_batch: the state of each slot, the checked rows of a step, and the tensors that the model gets
- prompt_parts: what an engine expects of vision towers and encoders
- encoder_inputs: `EncoderInputs`, what the encoder of an encoder-decoder model adds to a batch
- decode_fast_path: decode steps on CPU that continue the previous step without building a batch
- cuda_graphs: decode steps on a GPU, captured as CUDA graphs
- draft_runner, draft_head_runner: the draft model of speculative decoding, or a head on the served model
- prompt_logprobs: logprobs of prompt tokens
- page_files: `PageFiles`, KV pages on disk
- memory: the size of the KV cache and the limits that follow from it
- pooling_engine, pooling_startup: the engine of models that end in a vector, and its start
- torch_threads: the number of threads of torch's CPU kernels
- startup: loads the models, measures memory, warms up, captures CUDA graphs
"""

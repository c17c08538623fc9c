"""The fake worker (`--worker scripted`): deterministic tokens without a model, and strict checks of each step.

Read fake_worker.py first.

- fake_worker: `FakeEngine`, which the worker loop runs, and `FakeWorker`, which checks and computes steps
- fake_tokens: tokens, logprobs and alternatives as functions of a hash
"""

"""The scheduler process: continuous batching over a paged KV cache. It knows token ids only, no strings, no torch.

Read scheduler.py first (messages in, steps and messages out), then step_planner.py (what the next step computes) and
kv_cache.py. Modules, from the entry point to the leaves:

- main: the process loop between the tokenizers' link and the worker's
- metrics: publishes counters as metrics and records the spans of requests
- scheduler: `Scheduler`, the state machine without sockets and clocks
- step_planner: `StepPlanner` (admission, decode rows, chunked prefill, preemption) and `StepBuilder`
- in_flight: steps that were sent: pipeline, validation of results, distribution of tokens, prompt logprobs
- speculation: draft counts per row; n-gram proposer and acceptance of a draft model
- decode_batch: requests that hold slots, and the columns of those that decode
- kv_cache: `KVCacheManager` (pages of requests)
- page_index: `PageIndex` (pages that the worker keeps in files)
- image_transfers: `ImageTransfers` (images of other hosts that the worker needs)
- page_pool: `PagePool` (reference counts, prefix cache, eviction)
- state_snapshots: `StateSnapshots` (copies of recurrent state that prefixes go on from)
- peers: tokenizers, the worker, the outbox and the status report
- adapters: which LoRA adapters the worker has, and the updates that bring it to those wanted
- waiting_queue: `WaitingQueue`, fair between clients by virtual token counters
- request: `Request`, `TokenizerPeer`, `ClientShare`
- columns: packed columns of tokens and the operations on whole columns
- estimators: prefill budget, linear fit, wait estimator
- journal: `RecordedScheduler` writes every call to a file
- replay: repeats the calls of a journal
- counters: sums that the metrics are made of
"""

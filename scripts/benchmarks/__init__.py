"""Benchmarks, run by `scripts/bench [MEASUREMENT] [OPTIONS]`. Read __main__.py first: it lists what can be measured.

- serving: one server over HTTP; comparison: this server and its peers (peers, peer_cpu, servers, streams,
  workloads)
- front_ends, latency, turns, speculation: the processes around the worker
- scheduler, sampling, kernels, step, lora, gpu, quality: one component, without a server (engine_driver, shapes)
- plots: the charts of docs/performance.md
"""

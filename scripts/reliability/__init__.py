"""Reliability runs on real processes: `scripts/chaos`.

Read chaos.py first.

- chaos: starts a server, disturbs its processes under load, compares every answer, prints the verdict
- features: the requests, with every feature of the API, and what of an answer is compared
- adapter_changes: loads and unloads an adapter at run time
- client: one HTTP request over its own connection, with retries and resumption
- network: hosts on an emulated network with delay, loss and cuts: tests/live/test_network.py, `scripts/bench links`
"""

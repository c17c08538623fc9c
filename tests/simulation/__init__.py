"""Deterministic simulation of whole servers: routers, tokenizers, scheduler, worker loop and links run in one process
on virtual time, over a seeded network, while processes are killed and stopped and connections break.

Read simulation.py first. Its code is not that of tests/scheduler/simulation.py, which steps a scheduler by hand.

- simulation: `Simulation`, one run of one seed; its configuration and its trace
- clock: virtual time
- network: sockets with the behaviour of ZeroMQ's, for the product's `Link`
- processes: the processes, each with the product's own classes and loop, and the supervisor that restarts them
- faults: what goes wrong
- workload: clients, their requests, and the answers that these must get
- invariants: what must hold on the links and of the health
- planted_bugs: bugs that the simulation must find
- main: the command line of scripts/simulate
"""

"""Tests of the scheduler without processes: a simulation of tokenizers, scheduler and fake worker in one thread.

Read simulation.py first.
"""

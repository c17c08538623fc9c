"""Starts, supervises and ends processes. Read process (the child) and supervisor (the parent) first.

process        the child side: entry point, poll loop, heartbeat, state file
supervisor     the parent side: start, restart, drain
child          a child process: start, heartbeat, report of its end
fork_server    imports what roles need once, and forks their processes
control        commands to a supervisor, over a socket in the run directory
rollout        what `tgi restart`, `tgi scale` and `tgi reload` do, step by step
model_table    which of several models are loaded: states and what follows on them
model_manager  several models: hears front ends, and carries out what the table decides
watched_link   a link in a thread of its own, for a process that must end with its peers
process_table  processes and load of a run directory, for `tgi ps` and `tgi top`
"""

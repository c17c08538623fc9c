"""What this host gives: files, memory, the terminal. Nothing here knows messages or settings.

rundir          the run directory: sockets, locks, state files
mapped_file     a small file that several processes map
control_groups  limits of memory and CPUs: cgroup v1 and v2, ulimit
heap            returns freed memory to the system
interpreter     how child processes of the same Python are started
terminal        tells a hang-up of the terminal from a SIGHUP that reloads files; what it can show
"""

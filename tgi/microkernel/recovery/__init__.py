"""What happens to requests when a process dies. Read assignments first.

assignments      which neighbour below has which request; what is submitted again after a loss
work_register    what a process has in progress, in shared memory
exit_causes      why a process has ended, in words, and whether by its own fault
crash_isolation  finds the requests that crash a process, by trial
quarantine       requests that are refused because they crash processes
"""

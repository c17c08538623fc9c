"""Messages, links, supervision, settings, logs and metrics: what all processes share. Knows no HTTP and no model.

Read first: protocol (all messages), then link (how they travel) and process (the loop of every role).

Messages
    protocol         every message, the states of a request, finish reasons
    sampling_params  the table of generation parameters
    codec            typed messages to msgpack frames and back; packed columns of numbers
    link             message channels between processes, with connect and disconnect events
    liveness         finds silent peers, and measures how long work makes no progress
    curve            links between hosts: key files, and who may connect

Processes
    process          the child side: entry point, poll loop, heartbeat, state file
    supervisor       the parent side: start, restart, drain
    child            a child process: start, heartbeat, report of its end
    exit_causes      why a process has ended, in words, and whether by its own fault
    control          commands to a supervisor, over a socket in the run directory
    rollout          what `tgi restart`, `tgi scale` and `tgi reload` do, step by step
    terminal         tells a hang-up of the terminal from a SIGHUP that reloads files; what it can show
    token_bucket     a limit on the rate of an action
    rundir           the run directory: sockets, locks, state files
    work_register    what a process has in hand, in shared memory
    assignments      which neighbour below has which request; what is submitted again after a loss
    crash_isolation  finds the requests that crash a process, by trial
    quarantine       requests that are refused because they crash processes
    permits          the limit of concurrent requests, shared by all front ends
    control_groups   limits of memory and CPUs: cgroup v1 and v2, ulimit
    heap             returns freed memory to the system
    interpreter      how child processes of the same Python are started

Configuration
    settings         the table of settings
    settings_loading settings from flags and environment, checked; lora_adapters: the list of --lora-adapters
    options          what a setting consists of, and the parsers of values

Observability
    log              text and JSON logs
    metrics          the table of metric series; recording and rendering them
    metric_store     samples in memory-mapped files that processes of a host share
    flight_recorder  stamps of every request in a ring that survives the process, for `tgi why`
    request_timeline what `tgi why` tells from these stamps
    tracing, otlp    OpenTelemetry; otlp is imported only with --otlp-endpoint
    progress         the progress bar and the summary at start
    process_table    processes and load of a run directory, for `tgi ps` and `tgi top`

errors               UserError and ProtocolError
"""

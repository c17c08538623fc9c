"""Messages, links, supervision, settings, logs and metrics: what all processes share. Knows no HTTP and no model.

Read first: messages.protocol (all messages), then links.link (how they travel) and processes.process (the loop of every
role).

messages       what processes tell each other
links          how messages travel
processes      start, supervision and end of processes
host           the run directory, mapped files, limits of memory
recovery       what happens to requests when a process dies
admission      API keys, permits, limits of tokens
settings       flags and environment variables
observability  logs, metrics, traces, `tgi why`
errors         UserError and ProtocolError
"""
